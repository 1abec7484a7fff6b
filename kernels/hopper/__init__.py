# mypy: disable-error-code="no-untyped-def"
"""What Gluon kernels on Hopper share: names that changed after triton 3.6, products from a ring of slices in shared
memory, and boxes of the bulk copy engine (TMA)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
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
def emit(y_desc, out, first, row, columns, boxes):
    """Writes tensors of [64, 64], each from its column on, through places of shared memory from `first` on. What was
    written before has been read by the copy engine first; what lies outside of y is left out."""
    tma.store_wait(0)
    sync()
    for i in gl.static_range(len(boxes)):
        out.index(first + i).store(boxes[i].to(y_desc.dtype))
    fence_async_shared()
    sync()
    for i in gl.static_range(len(boxes)):
        store_box(y_desc, [row, columns[i]], out.index(first + i))


@gluon.jit
def begin_slice(acc, x_ring, w_ring, full, stage, phase, HALF: gl.constexpr, FIRST: gl.constexpr, GATHER: gl.constexpr):
    """Begins to add the product of a ring's next slice to acc [64, N]: box HALF of x, of two a stage, by N rows of w
    from FIRST on. GATHER: single threads copy the boxes."""
    mbarrier.wait(full.index(stage), phase)
    if GATHER:
        # their copies are seen by the matrix unit behind a fence
        fence_async_shared()
    w = w_ring.index(stage).slice(FIRST, acc.shape[1])
    return warpgroup_mma(x_ring.index(stage * 2 + HALF), w.permute((1, 0)), acc, is_async=True)


@gluon.jit
def end_slice(token, empty, stage, phase, STAGES: gl.constexpr):
    """acc with that slice, and where the ring stands then."""
    # another group's products fill the matrix unit while this one waits for its own
    acc = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(empty.index(stage))
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def ring_product(
    acc, x_ring, w_ring, full, empty, stage, phase, slices,
    HALF: gl.constexpr, FIRST: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc with so many slices, and where the ring stands then."""
    for _ in range(slices):
        token = begin_slice(acc, x_ring, w_ring, full, stage, phase, HALF, FIRST, GATHER)
        acc, stage, phase = end_slice(token, empty, stage, phase, STAGES)
    return acc, stage, phase


_KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.uint8: gl.uint8,
}


@lru_cache(maxsize=4096)
def _described(shape: torch.Size, strides: tuple[int, ...], box: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """What a description holds beside its tensor, as Triton checks it."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _KINDS[dtype])
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return vars(TensorDescriptor(like, list(shape), list(strides), list(box), layout))


def boxes(source: torch.Tensor, *box: int) -> TensorDescriptor:
    """What the copy engine knows of a tensor, of 16-bit numbers or 8-bit floats, that it reads or writes in boxes;
    places outside of it read as zero and are not written. Checked once for all tensors of a shape: steps without a
    graph ask for hundreds.

    Raises ValueError when the tensor does not begin at a multiple of 16 bytes.
    """
    if source.data_ptr() % 16:
        raise ValueError("the bulk copy engine reads tensors that begin at a multiple of 16 bytes")
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_described(source.shape, source.stride(), box, source.dtype), base=source)
    return made


def whole_rows(cache: torch.Tensor) -> bool:
    """Whether a cache [N, G, block_size, D] is rows of D channels, wherever its blocks and heads lie."""
    d = cache.shape[-1]
    return cache.stride()[2:] == (d, 1) and cache.stride(0) % d == 0 and cache.stride(1) % d == 0


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """A cache of `whole_rows` as these rows, fewer than 2³¹."""
    n, g, block_size, d = cache.shape
    block, head = cache.stride()[:2]
    return cache.as_strided((((n - 1) * block + (g - 1) * head) // d + block_size, d), (d, 1))
