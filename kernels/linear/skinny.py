# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Triton kernels for products of few rows with a large weight: as fast as the weight can be read.

Both kernels give y = residual + act(norm(x) @ weightᵀ + bias) in one launch. `vector_kernel` multiplies and sums in
float32 (one row); `tile_kernel` uses the tensor cores (up to 64 rows), with the rows of a norm scaled after
the product, since (x·r·g) @ Wᵀ = r · ((x·g) @ Wᵀ) for a scalar r a row.

Programmatic dependent launch (PDL): a program lets the next kernel start at once, asks the L2 cache for the weights
that it will read, and only then waits for the kernel before it. Weights never change, so reading them early is safe;
everything that another kernel writes is touched after the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hardware import shared_bytes
from kernels.pipeline import fitting_stages
from kernels.prefetch import prefetch
from kernels.sizes import cdiv
from kernels.workspace import Workspace

INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    # gelu_tanh; tanh(z) = 2·sigmoid(2z) − 1
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    N, K, eps, offset,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One row of x; each program gives BN outputs. With ACT, N counts outputs and the weight has 2N rows.

    EVEN says that BN divides N and BK divides K.
    """
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    live = n < N
    rows = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up_rows = rows + N.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            cache_lines = tl.arange(0, PREFETCH // 64) * 64
            prefetch(w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + cache_lines[None, :])
            if ACT is not None:
                prefetch(w_ptr + (tl.minimum(n, N - 1) + N).to(tl.int64)[:, None] * K + cache_lines[None, :])

    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = acc
    square = tl.zeros((BK,), tl.float32)
    if STAGES == 0:
        inside = live[:, None] & (k < K)[None, :]
        w = tl.load(rows) if EVEN else tl.load(rows, mask=inside, other=0.0)
        up = w
        if ACT is not None:
            up = tl.load(up_rows) if EVEN else tl.load(up_rows, mask=inside, other=0.0)
        g = tl.load(norm_ptr + k, mask=k < K, other=0.0) if NORM else k
        if PDL:
            gdc_wait()
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        for start in range(0, K, BK):
            now = w.to(tl.float32)
            now_up = up.to(tl.float32)
            now_x = x.to(tl.float32)
            now_g = g.to(tl.float32) + offset
            # the next tile is on its way while this one is used
            ahead = start + BK + k
            more = (ahead < K)[None, :] if EVEN else (ahead < K)[None, :] & live[:, None]
            w = tl.load(rows + (start + BK), mask=more, other=0.0)
            if ACT is not None:
                up = tl.load(up_rows + (start + BK), mask=more, other=0.0)
            x = tl.load(x_ptr + ahead, mask=ahead < K, other=0.0)
            if NORM:
                g = tl.load(norm_ptr + ahead, mask=ahead < K, other=0.0)
                square += now_x * now_x
                now_x *= now_g
            acc += now * now_x[None, :]
            if ACT is not None:
                acc_up += now_up * now_x[None, :]
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(0, K, BK, num_stages=STAGES):
            at = start + k
            inside = (at < K)[None, :] & live[:, None]
            w = tl.load(rows + start) if EVEN else tl.load(rows + start, mask=inside, other=0.0)
            x = tl.load(x_ptr + at) if EVEN else tl.load(x_ptr + at, mask=at < K, other=0.0)
            x = x.to(tl.float32)
            if NORM:
                square += x * x
                g = tl.load(norm_ptr + at) if EVEN else tl.load(norm_ptr + at, mask=at < K, other=0.0)
                x *= g.to(tl.float32) + offset
            acc += w.to(tl.float32) * x[None, :]
            if ACT is not None:
                up = tl.load(up_rows + start) if EVEN else tl.load(up_rows + start, mask=inside, other=0.0)
                acc_up += up.to(tl.float32) * x[None, :]

    y = tl.sum(acc, axis=1)
    y_up = tl.sum(acc_up, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
        y *= scale
        y_up *= scale
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        if ACT is not None:
            y_up += tl.load(bias_ptr + N + n, mask=live, other=0.0).to(tl.float32)
    if ACT is not None:
        y = _activate(y, ACT) * y_up
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr,
    M, N, K, x_stride, y_stride, residual_stride, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, SERIAL: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SWAP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Each program gives BM rows of BN outputs, over SERIAL of the SPLIT · SERIAL slices of K;
    grid (N/BN, M/BM, SPLIT).

    The last slice to finish sums all slices in order, so the result does not depend on which one that is.
    With ACT, N counts outputs and the weight has 2N rows. SWAP puts the weight on the tensor cores' long side.
    DOT is the type that is multiplied: the operands' own, or float32 where that one cannot be (the interpreter).
    """
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(1)
    pid_k = tl.program_id(2)
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    live_n = n < N
    live_m = m < M
    reach = tl.cdiv(K, BK * SPLIT * SERIAL) * BK
    start = pid_k * SERIAL * reach
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up_rows = w_rows + N.to(tl.int64) * K
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            cache_lines = start + tl.arange(0, PREFETCH // 64) * 64
            prefetch(w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + cache_lines[None, :])
            if ACT is not None:
                prefetch(w_ptr + (tl.minimum(n, N - 1) + N).to(tl.int64)[:, None] * K + cache_lines[None, :])
        gdc_wait()

    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    total_up = total
    square = tl.zeros((BM,), tl.float32)
    for _ in range(SERIAL):
        stop = tl.minimum(start + reach, K)
        acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        acc_up = acc
        for at in tl.range(start, stop, BK, num_stages=STAGES):
            inside = (at + k) < stop
            if EVEN:
                w = tl.load(w_rows + at)
            else:
                w = tl.load(w_rows + at, mask=live_n[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_rows + at, mask=live_m[:, None] & inside[None, :], other=0.0)
            if NORM:
                g = tl.load(norm_ptr + at + k, mask=inside, other=0.0).to(tl.float32) + offset
                f = x.to(tl.float32)
                square += tl.sum(f * f, axis=1)
                x = (f * g[None, :]).to(x_ptr.dtype.element_ty)
            x = x.to(DOT)
            w = w.to(DOT)
            if SWAP:
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
            if ACT is not None:
                if EVEN:
                    u = tl.load(up_rows + at)
                else:
                    u = tl.load(up_rows + at, mask=live_n[:, None] & inside[None, :], other=0.0)
                u = u.to(DOT)
                if SWAP:
                    acc_up = tl.dot(u, tl.trans(x), acc_up, input_precision="ieee")
                else:
                    acc_up = tl.dot(x, tl.trans(u), acc_up, input_precision="ieee")
        total += acc
        total_up += acc_up
        start = stop
    acc = total
    acc_up = total_up
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)

    out_mask = live_m[:, None] & live_n[None, :]
    last = True
    if SPLIT > 1:
        cell = m.to(tl.int64)[:, None] * N + n[None, :]
        slice_size = M.to(tl.int64) * N
        tl.store(partial_ptr + pid_k * slice_size + cell, acc, mask=out_mask)
        tl.debug_barrier()
        counter = count_ptr + pid_m * tl.num_programs(0) + pid_n
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros((BM, BN), tl.float32)
            for split in range(SPLIT):
                acc += tl.load(partial_ptr + split * slice_size + cell, mask=out_mask, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
    if last:
        if NORM:
            scale = tl.rsqrt(square / K + eps)
            acc *= scale[:, None]
            acc_up *= scale[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
            if ACT is not None:
                acc_up += tl.load(bias_ptr + N + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
        if ACT is not None:
            acc = _activate(acc, ACT) * acc_up
        if RESIDUAL:
            spot = residual_ptr + m.to(tl.int64)[:, None] * residual_stride + n[None, :]
            acc += tl.load(spot, mask=out_mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True, slots=True)
class VectorTile:
    """How `vector_kernel` is cut: outputs and inputs a tile, warps a program.

    stages: depth of the load pipeline in shared memory; 0 keeps one tile ahead in registers.
    prefetch: inputs of each output whose weights are asked for before the kernel before has finished.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int = 0
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """How `tile_kernel` is cut: rows, outputs and inputs a tile, slices of the inputs (`split` of them to
    a program each, `serial` one after another), pipeline depth where it fits, warps."""

    rows: int
    outputs: int
    inputs: int
    split: int = 1
    serial: int = 1
    stages: int = 4
    warps: int = 4
    swap: bool = False
    prefetch: int = 0


def counters(workspace: Workspace) -> torch.Tensor:
    """Zeros that split products count their slices in; each product leaves them zero."""
    return workspace.counters("slices of a product", 1 << 16)


def _dot_type(dtype: torch.dtype) -> tl.dtype:
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def _stages(x: torch.Tensor, tile: Tile, wide: int, norm: bool) -> int:
    """The depth at which the tile's pipeline fits. wide: rows of the weight an output."""
    rows = tile.rows * tile.inputs * x.element_size()
    weights = wide * tile.outputs * tile.inputs * x.element_size()
    # the norm's weights come with each round, and what they make of x stands beside what was loaded
    normed = (tile.inputs * x.element_size(), rows) if norm else (0, 0)
    return fitting_stages(tile.stages, rows + weights + normed[0], shared_bytes(x.device), normed[1])


def vector_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float,
    offset: float, residual: torch.Tensor | None, activation: str | None, tile: VectorTile,
) -> torch.Tensor:  # fmt: skip
    """`linear` for one row."""
    k = weight.shape[1]
    n = weight.shape[0] // (2 if activation else 1)
    y = torch.empty((1, n), dtype=x.dtype, device=x.device)
    workspace.launch(vector_kernel, (cdiv(n, tile.outputs),))(
        x, weight, bias, norm_weight, residual, y, n, k, eps, offset,
        BN=tile.outputs, BK=tile.inputs, STAGES=tile.stages,
        NORM=norm_weight is not None, ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None,
        EVEN=n % tile.outputs == 0 and k % tile.inputs == 0, PDL=workspace.pdl,
        PREFETCH=tile.prefetch if workspace.pdl else 0, num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return y


def tile_linear(
    workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float,
    offset: float, residual: torch.Tensor | None, activation: str | None, tile: Tile,
) -> torch.Tensor:  # fmt: skip
    """`linear` on tensor cores."""
    m, k = x.shape
    wide = 2 if activation else 1
    n = weight.shape[0] // wide
    assert tile.split == 1 or activation is None, "a slice keeps one sum, and a gated output has two"
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (cdiv(n, tile.outputs), cdiv(m, tile.rows), tile.split)
    partials = y if tile.split == 1 else torch.empty((tile.split, m, n), dtype=torch.float32, device=x.device)
    counts = y if tile.split == 1 else counters(workspace)
    stages = _stages(x, tile, wide, norm_weight is not None)
    workspace.launch(tile_kernel, grid)(
        x, weight, bias, norm_weight, residual, y, partials, counts,
        m, n, k, x.stride(0), y.stride(0), residual.stride(0) if residual is not None else 0, eps, offset,
        BM=tile.rows, BN=tile.outputs, BK=tile.inputs, SPLIT=tile.split, SERIAL=tile.serial, STAGES=stages,
        NORM=norm_weight is not None, ACT=activation, BIAS=bias is not None, RESIDUAL=residual is not None,
        SWAP=tile.swap, EVEN=n % tile.outputs == 0 and k % (tile.inputs * tile.split * tile.serial) == 0,
        PDL=workspace.pdl, PREFETCH=tile.prefetch if workspace.pdl else 0, DOT=_dot_type(x.dtype),
        num_warps=tile.warps, launch_pdl=workspace.pdl,
    )  # fmt: skip
    return y
