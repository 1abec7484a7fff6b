"""Repacks a checkpoint's words by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.repack.reference import Stored
from kernels.sizes import cdiv
from kernels.workspace import Workspace

# Of words and of outputs: loads and stores of a tile are whole lines of 128 bytes.
_BLOCK = 32


@triton.jit(
    do_not_specialize=["N", "K", "W", "stride"],
    do_not_specialize_on_alignment=["p_words", "p_places", "p_out"],
)
def _repack(
    p_words,
    p_places,
    p_out,
    N,
    K,
    W,
    stride,
    BITS: tl.constexpr,
    IS_AWQ: tl.constexpr,
    IS_TURNED: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes BLOCK of the W words of BLOCK outputs, which with AWQ are those of one place in stored words.

    IS_TURNED: the words of an output stand beside each other; otherwise those of an input, or of several, do.
    """
    EACH: tl.constexpr = 32 // BITS
    tile = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if IS_AWQ:
        # Programs beside each other read the same words.
        beside = tile % EACH
        column += tile // EACH * BLOCK
        n = column * EACH + beside
        place = (beside // 2 + beside % 2 * (EACH // 2)).to(tl.int32)
    else:
        column += tile * BLOCK
        n = column
    kw = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_out = (n < N)[:, None] & (kw < W)[None, :]
    if IS_AWQ or HAS_ORDER:
        out = tl.zeros([BLOCK, BLOCK], dtype=tl.int32)
        for i in tl.static_range(EACH):
            k = kw * EACH + i
            if IS_AWQ:
                row = k
                shift = place * BITS
            else:
                held = tl.load(p_places + k, mask=k < K, other=0)
                row = held // EACH
                shift = ((held % EACH) * BITS).to(tl.int32)[None, :]
            at = column[:, None] * stride + row[None, :] if IS_TURNED else row[None, :] * stride + column[:, None]
            words = tl.load(p_words + at, mask=(n < N)[:, None] & (k < K)[None, :], other=0)
            out |= ((words >> shift) & ((1 << BITS) - 1)) << (BITS * i)
    else:
        at = column[:, None] * stride + kw[None, :] if IS_TURNED else kw[None, :] * stride + column[:, None]
        out = tl.load(p_words + at, mask=m_out, other=0)
    tl.store(p_out + n[:, None] * W + kw[None, :], out, mask=m_out)


def repack(
    workspace: Workspace,
    words: torch.Tensor,
    layout: Stored,
    bits: int,
    outputs: int,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """words → [N, ceil(K · bits / 32)] int32, packed along inputs. Shapes as in the reference.

    It keeps nothing between launches, which may run in any stream.
    """
    words = words if words.stride(1) == 1 else words.contiguous()
    stored, columns = words.shape
    if layout == "awq":
        inputs, width, tiles = stored, cdiv(stored * bits, 32), cdiv(columns, _BLOCK) * (32 // bits)
    else:
        width = stored if layout == "gptq" else columns
        inputs, tiles = width * (32 // bits), cdiv(outputs, _BLOCK)
        if places is not None:
            inputs, width = len(places), cdiv(len(places) * bits, 32)
    out = torch.empty(outputs, width, dtype=torch.int32, device=words.device)
    if out.numel():
        about = (outputs, inputs, width, words.stride(0))
        options = {"BITS": bits, "IS_AWQ": layout == "awq", "IS_TURNED": layout == "pack-quantized"}
        launch = workspace.launch(_repack, (tiles, cdiv(width, _BLOCK)))
        launch(words, places, out, *about, **options, HAS_ORDER=places is not None, BLOCK=_BLOCK, num_warps=4)
    return out
