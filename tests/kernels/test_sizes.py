"""Sizes of grids and tiles: what Triton's functions of these names give."""

from __future__ import annotations

import triton
from hypothesis import given
from hypothesis import strategies as st

from kernels.sizes import cdiv, next_power_of_2


@given(n=st.integers(0, 1 << 40), d=st.integers(1, 1 << 20))
def test_cdiv_is_tritons(n: int, d: int) -> None:
    assert cdiv(n, d) == triton.cdiv(n, d)


@given(n=st.integers(1, 1 << 40))
def test_next_power_of_2_is_tritons(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n)


def test_nothing_takes_a_tile_of_one() -> None:
    assert next_power_of_2(0) == 1
