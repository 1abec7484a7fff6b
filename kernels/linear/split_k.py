# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of 33 to 64 rows on Hopper as sums over splits of the inputs, in Gluon, for a kernel behind that adds them.

As in `warp_specialized`, for outputs so few that several programs take a tile of them. There they wait for each other's
sums; here they are done when their own are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hopper.boxes import boxes
from kernels.hopper.ring import cursor
from kernels.linear.warp_specialized import INPUTS, OUTPUTS, REGISTERS, ROWS, feed, products, rings
from kernels.sizes import cdiv
from kernels.workspace import Workspace


@gluon.jit
def _multiply(x_ring, w_ring, w_full, x_bars, partial_ptr, M, N, first, stop, slices, BM: gl.constexpr,
              BN: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Four warps: the products of a program's units, which are of one tile."""
    if PDL:
        gdc_wait()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    zero = cursor(first * 0)
    acc = gl.zeros((BN, BM), gl.float32, mma)
    acc, _, _ = products(acc, x_ring, w_ring, w_full, x_bars, zero, zero, stop - first, STAGES, X_STAGES)
    tile = first // slices
    split = (first - tile * slices) // (stop - first)
    n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, flat))[:, None]
    m = gl.arange(0, BM, gl.SliceLayout(0, flat))[None, :]
    row = split.to(gl.int64) * M + m
    gl.store(partial_ptr + row * N + n, gl.convert_layout(acc, flat), mask=(n < N) & (m < M))


@gluon.jit(do_not_specialize=["M"])
def split_k_kernel(
    x_desc, w_desc, partial_ptr, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """partial[s] = x[:, split s of K] · w[:, split s of K]ᵀ, [SPLIT, M, N], float32. SPLIT divides the slices of K."""
    slices = (K + BK - 1) // BK
    each = slices // SPLIT
    first = gl.program_id(0) * each
    stop = first + each
    if PDL:
        gdc_launch_dependents()

    w_ring, x_ring, w_full, x_bars, described = rings(x_desc, w_desc, BM, BN, BK, STAGES, X_STAGES)
    gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, w_full, x_bars, partial_ptr, M, N, first, stop, slices, BM, BN, STAGES,
                         X_STAGES, PDL)),
            (feed, (x_desc, w_desc, x_ring, w_ring, w_full, x_bars, described, first, stop, slices, N,
                    BM, BN, BK, 1, STAGES, X_STAGES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SplitKTile:
    """How `split_k_kernel` is cut: splits of the inputs, slices of weights and of x in its rings."""

    split: int
    stages: int
    x_stages: int


def split_k_tile(rows: int, n: int, k: int, multiprocessors: int) -> SplitKTile | None:
    """None where a product that adds up its own partials is as fast (measured on an H200 at 2,048 outputs of 2,048 and
    4,096 inputs, which four programs a tile read at once), and for sizes that were not measured."""
    split, slices = multiprocessors // cdiv(n, OUTPUTS), cdiv(k, INPUTS)
    if not ROWS // 2 < rows <= ROWS or split != 4 or not 16 <= slices <= 32 or slices % split:
        return None
    return SplitKTile(split, slices // split, 4 if slices <= 16 else 3)


def linear_partials(workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile) -> torch.Tensor:
    """x [M, k] · weight [n, k]ᵀ by splits of the inputs: [split, M, n], float32. Takes what `streams` allows."""
    (m, k), n = x.shape, weight.shape[0]
    partials = torch.empty(tile.split, m, n, dtype=torch.float32, device=x.device)
    workspace.launch(split_k_kernel, (cdiv(n, OUTPUTS) * tile.split,))(
        boxes(x, ROWS, INPUTS), boxes(weight, OUTPUTS, INPUTS), partials, m, n, k,
        BM=ROWS, BN=OUTPUTS, BK=INPUTS, STAGES=tile.stages, X_STAGES=tile.x_stages, SPLIT=tile.split, PDL=workspace.pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return partials
