"""How the feed-forward parts of experts in blocks of GGUF files are cut, decided once a shape. There is one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.moe_gemm.gguf_tiles import gguf_moe
from kernels.moe_gemm.operands import Operands
from kernels.sizes import next_power_of_2

# Pairs of a tile.
MIN_PAIRS, MAX_PAIRS = 16, 64


class GgufProblem(NamedTuple):
    """Pairs of token and expert; experts whose matrices are here."""

    pairs: int
    experts: int
    deterministic: bool


def _tiles(operands: Operands, rows: int) -> torch.Tensor:
    workspace, x, gate_up, down, weights, experts, residual, activation, limit, _, biases = operands
    return gguf_moe(workspace, x, gate_up, down, weights, experts, residual, activation, limit, biases, rows)


DISPATCH: Dispatch[GgufProblem] = Dispatch(
    [
        Variant(
            "invariant",
            lambda problem: None if problem.deterministic else "for runtime.deterministic",
            lambda problem: MIN_PAIRS,
            _tiles,
            "not the fastest: each output is the same sum in any batch; docs/performance.md, batch invariance",
        ),
        Variant(
            "tiles",
            lambda problem: None,
            lambda problem: min(MAX_PAIRS, max(MIN_PAIRS, next_power_of_2(problem.pairs // problem.experts))),
            _tiles,
            "not measured for GGUF: tiles of packed experts, docs/experiments/2026-11-24-quantized-experts.md",
        ),
    ]
)
