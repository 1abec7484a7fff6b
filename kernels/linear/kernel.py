"""Matrix product with weights stored as [out, in], fused with its neighbours when there are few rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gated_activation.kernel import gated_activation
from kernels.linear.skinny import tile_kernel, vector_kernel
from kernels.rms_norm.kernel import rms_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class VectorTile:
    """How `vector_kernel` is cut: outputs and inputs a tile, warps a program."""

    outputs: int
    inputs: int
    warps: int
    prefetch: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """How `tile_kernel` is cut: rows, outputs and inputs a tile, slices of the inputs, pipeline depth, warps."""

    rows: int
    outputs: int
    inputs: int
    split: int = 1
    stages: int = 4
    warps: int = 4
    swap: bool = False
    prefetch: bool = True


@lru_cache(maxsize=8)
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that split products count their slices in; each product leaves them zero. One stream at a time."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def _dot_type(dtype: torch.dtype) -> tl.dtype:
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def vector_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, eps: float,
    offset: float, residual: torch.Tensor | None, activation: str | None, tile: VectorTile, pdl: bool,
) -> torch.Tensor:  # fmt: skip
    """`linear` for one row."""
    k = weight.shape[1]
    n = weight.shape[0] // (2 if activation else 1)
    y = torch.empty((1, n), dtype=x.dtype, device=x.device)
    extra: dict[str, Any] = {} if INTERPRETED else {"num_warps": tile.warps, "launch_pdl": pdl}
    vector_kernel[(triton.cdiv(n, tile.outputs),)](
        x, weight, bias, norm_weight, residual, y, n, k, eps, offset,
        BN=tile.outputs, BK=tile.inputs,
        NORM=norm_weight is not None, ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None,
        EVEN=n % tile.outputs == 0 and k % tile.inputs == 0, PDL=pdl, PREFETCH=tile.prefetch and k % 8 == 0, **extra,
    )  # fmt: skip
    return y


def tile_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, eps: float,
    offset: float, residual: torch.Tensor | None, activation: str | None, tile: Tile, pdl: bool,
) -> torch.Tensor:  # fmt: skip
    """`linear` on tensor cores."""
    m, k = x.shape
    n = weight.shape[0] // (2 if activation else 1)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n, tile.outputs), triton.cdiv(m, tile.rows), tile.split)
    parts = y if tile.split == 1 else torch.empty((tile.split, m, n), dtype=torch.float32, device=x.device)
    counts = y if tile.split == 1 else _counters(x.device)
    extra: dict[str, Any] = {} if INTERPRETED else {"num_warps": tile.warps, "launch_pdl": pdl}
    tile_kernel[grid](
        x, weight, bias, norm_weight, residual, y, parts, counts,
        m, n, k, x.stride(0), y.stride(0), residual.stride(0) if residual is not None else 0, eps, offset,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, SPLIT=tile.split, STAGES=tile.stages,
        NORM=norm_weight is not None, ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None,
        SWAP=tile.swap, EVEN=n % tile.outputs == 0 and k % (tile.inputs * tile.split) == 0,
        PDL=pdl, PREFETCH=tile.prefetch and k % 8 == 0, DOT=_dot_type(x.dtype), **extra,
    )  # fmt: skip
    return y
