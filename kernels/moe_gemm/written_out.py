"""Many pairs with packed experts: the numbers of some experts at a time are written out, and dense products take them.
That costs one pass over the experts, where the products have hundreds of operations a byte of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels.linear.unpack import unpacked
from kernels.moe_gemm import dense
from kernels.moe_gemm.dispatch import pair_tiles
from kernels.moe_gemm.order import ordered
from kernels.moe_gemm.tiles import combined, tile_products
from kernels.routing import ExpertBiases
from kernels.weight import Dense, Fp4, PackedInt, Weight
from kernels.workspace import Workspace

# The most memory that experts take at once.
WRITTEN_BYTES = 2 << 30


def writes_out(gate_up: Weight, down: Weight) -> bool:
    """Whether `written_out_moe` takes these: inputs stay as they are, in the weight's order."""
    return all(
        not weight.rounds_inputs
        and (isinstance(weight, Fp4) or (isinstance(weight, PackedInt) and weight.order is None))
        for weight in (gate_up, down)
    )


def written_out_moe(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: PackedInt | Fp4,
    down: PackedInt | Fp4,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    biases: ExpertBiases | None,
) -> torch.Tensor:
    """`moe_gemm` of experts that `writes_out` takes, as many at a time as WRITTEN_BYTES hold."""
    (t, hidden), (count, width, _), k = x.shape, gate_up.shape, experts.shape[1]
    most = max(1, WRITTEN_BYTES // (3 * (width // 2) * hidden * x.element_size()))
    if most >= count:
        tables = [Dense(_numbers(workspace, weight, 0, count, x.dtype)) for weight in (gate_up, down)]
        given = (weights, experts, residual, activation, limit)
        return dense.moe_gemm(workspace, x, tables[0], tables[1], *given, biases=biases)
    x, experts = x.contiguous(), experts.contiguous()
    h = torch.empty(t * k, width // 2, dtype=x.dtype, device=x.device)
    y = torch.empty(t * k, hidden, dtype=x.dtype, device=x.device)
    rows, up_tile, down_tile = pair_tiles(t * k, count, x.dtype, dense.bulk_rows(x, width // 2))
    for first in range(0, count, most):
        stop = min(first + most, count)
        own = None if biases is None else ExpertBiases(biases.gate_up[first:stop], biases.down[first:stop])
        up, out = (_numbers(workspace, weight, first, stop, x.dtype) for weight in (gate_up, down))
        places = ordered(workspace, experts - first, stop - first, rows)
        tile_products(workspace, x, up, out, weights, h, y, activation, limit, places, up_tile, down_tile, own)
    return combined(workspace, y, None, experts, weights, residual, count, x.dtype)


def _numbers(workspace: Workspace, weight: PackedInt | Fp4, first: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [stop − first, N, K] of experts `first` to `stop`."""
    name, beside = ("factor", weight.factor) if isinstance(weight, Fp4) else ("zero", weight.zero)
    parts: dict[str, Any] = {"data": weight.data[first:stop].flatten(0, 1)}
    parts |= {"scale": weight.scale[first:stop].flatten(0, 1)}
    if beside is not None:
        parts[name] = beside[first:stop].flatten(0, 1)
    return unpacked(workspace, replace(weight, **parts), dtype).view(stop - first, *weight.shape[1:])
