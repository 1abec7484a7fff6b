# mypy: disable-error-code="no-untyped-def"
"""What Gluon kernels on Hopper share: names that changed after triton 3.6, and boxes of the bulk copy engine (TMA)."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
load_pointers = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
view = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage of a ring behind this one, and the parity of its barriers."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def halves(acc, N: gl.constexpr):
    """[64, 2N], a warpgroup's, as its first and its last N columns."""
    return gl.split(gl.permute(gl.reshape(acc, (64, 2, N)), (0, 2, 1)))


@gluon.jit
def plus(a, b):
    """Of two partial sums their sum, for a scan."""
    return a + b


@gluon.jit
def emit(y_desc, out, first, row, column, boxes):
    """Writes tensors of [64, 64] side by side, through places of shared memory from `first` on. What was written before
    has been read by the copy engine first."""
    tma.store_wait(0)
    sync()
    for i in gl.static_range(len(boxes)):
        out.index(first + i).store(boxes[i].to(y_desc.dtype))
    fence_async_shared()
    sync()
    for i in gl.static_range(len(boxes)):
        store_box(y_desc, [row, column + 64 * i], out.index(first + i))


@lru_cache(maxsize=64)
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory. Eager steps ask for three of them a launch."""
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def boxes(source: torch.Tensor, *box: int) -> TensorDescriptor:
    """What the copy engine knows of a tensor, of 16-bit values, that it reads or writes in boxes; places outside of it
    read as zero and are not written."""
    return TensorDescriptor(source, list(source.shape), list(source.stride()), list(box), _layout(box, source.dtype))


def whole_rows(cache: torch.Tensor) -> bool:
    """Whether a cache [N, G, block_size, D] is rows of D channels, wherever its blocks and heads lie."""
    d = cache.shape[-1]
    return cache.stride()[2:] == (d, 1) and cache.stride(0) % d == 0 and cache.stride(1) % d == 0


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """A cache of `whole_rows` as these rows, fewer than 2³¹."""
    n, g, block_size, d = cache.shape
    block, head = cache.stride()[:2]
    return cache.as_strided((((n - 1) * block + (g - 1) * head) // d + block_size, d), (d, 1))
