# mypy: disable-error-code="no-untyped-def"
"""What ends a tile of a product of quantized weights: its slices are added up, then bias, activation and residual."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear.skinny import _activate


@triton.jit
def summed(y, cells, slice_size, counter, pid_k, stored, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Stores slice `pid_k` of a tile [BM, BN]. For the last of SPLIT slices to arrive, all of them, added up in order,
    and True. cells: where the first slice has its tile, others stand `slice_size` apart; counter is left zero."""
    tl.store(cells + pid_k * slice_size, y, mask=stored)
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
    if last:
        y = tl.zeros((BM, BN), tl.float32)
        for split in range(SPLIT):
            y += tl.load(cells + split * slice_size, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    return y, last


@triton.jit
def finished(
    y, y_up, bias_ptr, residual_ptr, at, N, n, live, stored,
    ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """residual + act(y + bias) of a tile [BM, BN] of outputs n; with ACT, y is the gate and y_up its up half.
    at: where the residual has the tile."""
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)[None, :]
        if ACT is not None:
            y_up += tl.load(bias_ptr + N + n, mask=live, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        y = _activate(y, ACT) * y_up
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=stored, other=0.0).to(tl.float32)
    return y


@triton.jit
def store_tile(
    acc, acc_up, n, m, bias_ptr, residual_ptr, y_ptr, partial_ptr, count_ptr, M, N, y_stride, residual_stride,
    SPLIT: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Ends a program's tile of sums acc [BN, BM] of outputs n and rows m, of a grid (N/BN, M/BM, SPLIT): `summed` and
    `finished`, in y. acc_up: the up half's sums, with ACT."""
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    y = tl.trans(acc)
    y_up = tl.trans(acc_up)
    live = n < N
    spot = m.to(tl.int64)[:, None]
    stored = (m < M)[:, None] & live[None, :]
    last = True
    if SPLIT > 1:
        counter = count_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        cells = partial_ptr + spot * N + n[None, :]
        y, last = summed(y, cells, M.to(tl.int64) * N, counter, tl.program_id(2), stored, BM, BN, SPLIT)
    if last:
        y = finished(y, y_up, bias_ptr, residual_ptr, spot * residual_stride + n[None, :], N, n, live, stored, ACT,
                     BIAS, RESIDUAL)  # fmt: skip
        tl.store(y_ptr + spot * y_stride + n[None, :], y.to(y_ptr.dtype.element_ty), mask=stored)
