# mypy: disable-error-code="no-untyped-def"
"""What products of quantized experts share, whatever their weights' format: a tile's pairs within a kernel, and before
the launches the order of pairs, room for results, and what both kernels are compiled with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.moe_gemm.order import ordered
from kernels.routing import ExpertBiases
from kernels.sizes import next_power_of_2
from kernels.workspace import Workspace


@triton.jit
def pairs_at(pairs, start, stop, ROWS: tl.constexpr):
    """ROWS places of an expert from `start` on, and the pairs there. Rows past the expert's last, before `stop`, repeat
    its pair and are not stored."""
    place = start + tl.arange(0, ROWS)
    return place, tl.load(pairs + tl.minimum(place, stop - 1)).to(tl.int64)


@dataclass(frozen=True, slots=True)
class PairProducts:
    """Both products of chosen experts before their launch.

    h: [T · K, inter] and y: [T · K, hidden], unwritten, of the inputs' dtype. places: pairs by expert, where each
    expert's begin and where its tiles end. tiles: how many there may be. biases: of both products. constants: what both
    kernels are compiled with.
    """

    h: torch.Tensor
    y: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    tiles: int
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    constants: dict[str, Any]


def pair_products(
    workspace: Workspace,
    x: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    inter: int,
    biases: ExpertBiases | None,
    rows: int,
) -> PairProducts:
    """The pairs of x [T, hidden] and experts [T, K], dense, of `count` experts, ordered into tiles of `rows` by a
    launch."""
    pairs, hidden = experts.numel(), x.shape[1]
    places = ordered(workspace, experts, count, rows)
    return PairProducts(
        torch.empty(pairs, inter, dtype=x.dtype, device=x.device),
        torch.empty(pairs, hidden, dtype=x.dtype, device=x.device),
        (places.order, places.offsets, places.ends),
        places.tiles,
        (None, None) if biases is None else (biases.gate_up, biases.down),
        {
            "BIASED": biases is not None,
            "ROWS": rows,
            "BLOCK_E": next_power_of_2(count),
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "PDL": workspace.pdl,
            "launch_pdl": workspace.pdl,
        },
    )
