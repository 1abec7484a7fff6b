"""Feed-forward parts of chosen experts whose tables hold different kinds of numbers: a product for each table, and the
activation between them by itself. The kernels are those of tiles that read each kind as it is stored."""

from __future__ import annotations

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.moe_gemm.packed import packed_second
from kernels.moe_gemm.pair_tiles import PairProducts, pair_products
from kernels.moe_gemm.quantized_dispatch import pair_tiles
from kernels.moe_gemm.tiles import PairTile, combined
from kernels.moe_gemm.w8a8 import tiled, w8a8_second
from kernels.routing import ExpertBiases
from kernels.weight import Dense, Fp4, Fp8, Int8, PackedInt, Parts, Weight
from kernels.weight.inputs import AS_THEY_ARE
from kernels.workspace import Workspace

# Pairs of token and expert at once: each has a row of inputs of its own.
MAX_PAIRS = 1 << 14


def moe_gemm(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """See the reference. gate_up may have a part for gate and one for up.

    Raises ValueError for an activation other than "silu" and "gelu_tanh".
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    each = max(1, MAX_PAIRS // experts.shape[1])
    left = (None,) * -(-len(x) // each) if residual is None else residual.split(each)
    runs = zip(x.split(each), weights.split(each), experts.split(each), left, strict=True)
    about = (activation, limit, deterministic, biases)
    made = [_of_run(workspace, a, gate_up, down, w, e, r, *about) for a, w, e, r in runs]
    return made[0] if len(made) == 1 else torch.cat(made)


def _of_run(
    workspace: Workspace,
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    deterministic: bool,
    biases: ExpertBiases | None,
) -> torch.Tensor:
    x, experts = x.contiguous(), experts.contiguous()
    (count, _, inter), pairs = down.shape, experts.numel()
    cut = pair_tiles(0 if deterministic else pairs, count, x.dtype)
    both = pair_products(workspace, x, experts, count, inter, biases, cut.rows)
    rows, ones = x.repeat_interleave(experts.shape[1], dim=0), torch.ones_like(weights)
    up_bias, down_bias = both.biases
    halves, start = [], 0
    for table in gate_up.parts if isinstance(gate_up, Parts) else (gate_up,):
        stop = start + table.shape[1]
        own = None if up_bias is None else up_bias[:, start:stop].contiguous()
        half = torch.empty(pairs, stop - start, dtype=x.dtype, device=x.device)
        _product(workspace, rows, table, ones, both, own, half, cut.up)
        halves.append(half)
        start = stop
    h = gated_activation(workspace, torch.cat(halves, dim=1), activation, limit)
    _product(workspace, h, down, weights, both, down_bias, both.y, cut.down)
    return combined(workspace, both.y, None, experts, weights, residual, count, x.dtype)


def _product(
    workspace: Workspace,
    x: torch.Tensor,
    table: Weight,
    weights: torch.Tensor,
    both: PairProducts,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: PairTile,
) -> None:
    if isinstance(table, Dense):
        # Numbers of any kind whose rows have a scale.
        scale = torch.ones(1, 1, 1, dtype=torch.float32, device=x.device).expand(*table.shape[:2], 1)
        table = Int8(table.data, scale, AS_THEY_ARE)
    if isinstance(table, (Fp8, Int8)) and tiled(table):
        w8a8_second(workspace, x, table, weights, both, bias, y, tile)
    elif isinstance(table, (Fp4, PackedInt)):
        packed_second(workspace, x, table, weights, both, bias, y, tile)
    else:
        raise TypeError(f"moe_gemm has no launch for experts of the kind {type(table).__name__}")
