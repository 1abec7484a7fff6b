"""Rows are rounded number by number, whatever their sizes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.registry import Op
from kernels.round_rows.reference import Kind
from kernels.testing import bound, randn, seeded
from tests.kernels.formulas import round_rows as one_by_one

OP = Op("round_rows")
KINDS = ("fp8", "int8", "int4")


@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 9),
    k=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_numbers_of_any_sizes(
    kind: Kind, n: int, k: int, dtype: torch.dtype, size: float, seed: int, device: torch.device
) -> None:
    cpu = torch.device("cpu")
    rows = (randn(seeded(cpu, seed), cpu, torch.float32, n, k) * size).to(dtype)
    wanted = one_by_one(rows, kind)
    made, there = OP.reference(rows, kind), bound(OP)(rows.to(device), kind)
    for want, on_cpu, on_device in zip(wanted, made, there, strict=True):
        assert torch.equal(on_cpu.float(), want.float())
        assert torch.equal(on_device.cpu().float(), want.float())
