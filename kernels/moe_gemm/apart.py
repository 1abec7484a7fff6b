# mypy: disable-error-code="no-untyped-def"
"""Feed-forward parts of chosen experts whose tables hold different kinds of numbers: a product for each table, and the
activation between them by itself. The kernels are those of tiles that read each kind as it is stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_gemm.packed import packed_second
from kernels.moe_gemm.pair_tiles import PairProducts, pair_products
from kernels.moe_gemm.quantized_dispatch import pair_tiles
from kernels.moe_gemm.rows import activate
from kernels.moe_gemm.tiles import PairTile, combined
from kernels.moe_gemm.w8a8 import tiled, w8a8_second
from kernels.routing import ExpertBiases
from kernels.sizes import cdiv
from kernels.weight import Dense, Fp4, Fp8, Int8, PackedInt, Parts, Weight
from kernels.weight.inputs import AS_THEY_ARE
from kernels.workspace import Workspace

# Pairs of token and expert at once: each has a row of inputs of its own.
MAX_PAIRS = 1 << 14
_BLOCK = 1024


@triton.jit
def _activate(
    gate, up, h, inter, limit, ACT: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """h = act(gate) ∘ up of a pair a program row, in float32, rounded once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < inter
    places = tl.program_id(0).to(tl.int64) * inter + columns
    g = tl.load(gate + places, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=live, other=0.0).to(tl.float32)
    tl.store(h + places, activate(g, u, limit, ACT, LIMITED).to(h.dtype.element_ty), mask=live)


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
    """See the reference. gate_up may have a part for gate and one for up."""
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
    h = _activated(workspace, halves, inter, activation, limit)
    _product(workspace, h, down, weights, both, down_bias, both.y, cut.down)
    return combined(workspace, both.y, None, experts, weights, residual, count, x.dtype)


def _activated(
    workspace: Workspace, halves: list[torch.Tensor], inter: int, activation: str, limit: float | None
) -> torch.Tensor:
    """halves: gates and ups of each pair, or both beside each other."""
    gate, up = halves if len(halves) == 2 else (half.contiguous() for half in halves[0].split(inter, dim=1))
    h, pdl = torch.empty_like(gate), workspace.pdl
    workspace.launch(_activate, (len(gate), cdiv(inter, _BLOCK)))(
        gate,
        up,
        h,
        inter,
        limit if limit is not None else 0.0,
        ACT=activation,
        LIMITED=limit is not None,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return h


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
