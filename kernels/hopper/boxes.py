# mypy: disable-error-code="no-untyped-def,assignment"
"""Boxes of the bulk copy engine (TMA): what it knows of a tensor, from the host, and of a cache as rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.uint8: gl.uint8,
}


@lru_cache(maxsize=4096)
def _described(
    shape: torch.Size, strides: tuple[int, ...], box: tuple[int, ...], dtype: torch.dtype, swizzle: int
) -> dict[str, Any]:
    """What a description holds beside its tensor, as Triton checks it."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _KINDS[dtype])
    if swizzle:
        layout = gl.NVMMASharedLayout(swizzle, layout.element_bitwidth, layout.rank)
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return vars(TensorDescriptor(like, list(shape), list(strides), list(box), layout))


def boxes(source: torch.Tensor, *box: int, swizzle: int = 0) -> TensorDescriptor:
    """What the copy engine knows of a tensor, of 16-bit numbers or 8-bit floats, that it reads or writes in boxes;
    places outside of it read as zero and are not written. Checked once for all tensors of a shape: steps without a
    graph ask for hundreds. swizzle: bytes of a row that stand together in shared memory; 0: as many as can.

    Raises ValueError when the tensor does not begin at a multiple of 16 bytes.
    """
    if source.data_ptr() % 16:
        raise ValueError("the bulk copy engine reads tensors that begin at a multiple of 16 bytes")
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_described(source.shape, source.stride(), box, source.dtype, swizzle), base=source)
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


@gluon.jit
def cache_rows(
    blocks, first, length, block_rows,
    BLOCK_SIZE: gl.constexpr, COPIED: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Of a sequence of `length` tokens, which row of `rows_of` each box of COPIED tokens from `first` on begins at.
    blocks: its row of the block table. Boxes behind the last token lie in block 0."""
    rows = ()
    for copy in gl.static_range(COPIES):
        j = first + copy * COPIED
        block = gl.load(blocks + j // BLOCK_SIZE, mask=j < length, other=0)
        rows = rows + (block * block_rows + j % BLOCK_SIZE,)  # noqa: RUF005
    return rows
