"""Words are repacked number by number, whatever their sizes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.registry import Op
from kernels.repack.reference import Stored
from kernels.sizes import cdiv
from kernels.testing import bound, randint, seeded
from tests.kernels.formulas import repack as one_by_one

OP = Op("repack")


@given(
    layout=st.sampled_from(["gptq", "awq", "pack-quantized"]),
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    ordered=st.booleans(),
    apart=st.integers(0, 3),
    again=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_numbers_of_any_sizes(
    layout: Stored, bits: int, n: int, k: int, ordered: bool, apart: int, again: int, seed: int, device: torch.device
) -> None:
    """again: inputs in an order that come once more."""
    bits, ordered = (4, False) if layout == "awq" else (bits, ordered)
    width, generator = cdiv(k * bits, 32), seeded(torch.device("cpu"), seed)
    rows, columns = {"gptq": (width, n), "awq": (k, cdiv(n, 8)), "pack-quantized": (n, width)}[layout]
    words = randint(generator, generator.device, -(1 << 31), 1 << 31, rows, columns + apart)[:, :columns]
    places = None
    if ordered:
        more = randint(generator, generator.device, 0, k, again, dtype=torch.int64)
        places = torch.cat((torch.randperm(k, generator=generator), more))
    wanted = one_by_one(words, layout, bits, n, places).int()
    assert torch.equal(OP.reference(words, layout, bits, n, places), wanted)
    there = None if places is None else places.to(device)
    assert torch.equal(bound(OP)(words.to(device), layout, bits, n, there).cpu(), wanted)
