"""numpy's way to make arrays, as a C extension calls it: what it would refuse comes out empty."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.serving.frontend.array_guard import _PLACE, _SIGNATURE, ArrayGuard


@pytest.fixture(scope="module")
def guard() -> Iterator[ArrayGuard]:
    made = ArrayGuard().install()
    yield made
    made.remove()


def made_in_c(guard: ArrayGuard, shape: list[int]) -> np.ndarray:
    """An array of int32 as the stub has it made: by the address in the table."""
    new_from_descr = _SIGNATURE(guard._table[_PLACE])
    api, dtype = ctypes.pythonapi, np.dtype(np.int32)
    api.Py_IncRef(ctypes.py_object(dtype))  # the function takes a reference of its own
    dims = (ctypes.c_int64 * len(shape))(*shape)
    address = new_from_descr(id(np.ndarray), id(dtype), len(shape), dims, None, None, 0, None)
    array: np.ndarray = ctypes.cast(address, ctypes.py_object).value
    api.Py_DecRef(ctypes.py_object(array))
    return array


@pytest.mark.parametrize("shape", [[2**62], [1, 2**62], [0, 2**62], [2**31, 2**31, 2**31], [-1], [-5, -5], [2**63 - 1]])
def test_a_shape_that_cannot_be_gives_an_array_without_elements(guard: ArrayGuard, shape: list[int]) -> None:
    assert made_in_c(guard, shape).size == 0


@given(st.lists(st.integers(0, 9), max_size=4))
def test_any_other_shape_is_kept(guard: ArrayGuard, shape: list[int]) -> None:
    array = made_in_c(guard, shape)
    assert array.shape == tuple(shape)
    assert array.dtype == np.int32


def test_without_the_guard_numpy_works_as_before() -> None:
    assert np.zeros((2, 3)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"too big|too large|allowed"):
        np.zeros(2**62, np.int32)
