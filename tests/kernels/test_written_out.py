"""Experts that do not fit in memory at once are written out in slices, with the numbers that they have together."""

from __future__ import annotations

import pytest
import torch

from kernels.moe_gemm import reference, written_out
from kernels.moe_gemm.cases import fp4_case, packed_case
from kernels.registry import Case
from kernels.testing import seeded
from kernels.workspace import Workspace

CASES = [
    fp4_case("biases", torch.float32, 50, 72, 40, 5, 4, biased=True, activation="swiglu_oai", limit=1.0, residual=True),
    packed_case("some experts elsewhere", torch.float32, 70, 36, 24, 5, 3, absent=2, zeros=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_slices_of_experts_give_what_all_give(
    case: Case, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case.make(device, seeded(device))
    assert written_out.writes_out(given["gate_up"], given["down"])
    _, width, hidden = given["gate_up"].shape
    monkeypatch.setattr(written_out, "WRITTEN_BYTES", at_once * 3 * (width // 2) * hidden * 4)
    names = ("x", "gate_up", "down", "weights", "experts", "residual", "activation", "limit", "biases")
    every = {"activation": "silu", "limit": None, "biases": None, **given}
    got = written_out.written_out_moe(Workspace(device), *(every[name] for name in names))
    torch.testing.assert_close(got, reference.moe_gemm(**given), atol=2e-4, rtol=1e-4)
