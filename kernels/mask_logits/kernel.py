"""Bans of tokens by one bit each, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import cdiv
from kernels.workspace import Workspace

_CHUNK = 4096


@triton.jit
def _mask(p_logits, p_seqs, p_masks, logits_stride, masks_stride, V, FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """FIRST is a constant, so that 32 tokens that share a word load it once where it is a multiple of 32."""
    i_mask = tl.program_id(0).to(tl.int64)
    seq = tl.load(p_seqs + i_mask).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    held = token < V
    bit = FIRST + token
    word = tl.load(p_masks + i_mask * masks_stride + bit // 32, mask=held, other=-1)
    banned = ((word >> (bit % 32)) & 1) == 0
    tl.store(p_logits + seq * logits_stride + token, float("-inf"), mask=held & banned)


def mask_logits(
    workspace: Workspace, logits: torch.Tensor, seqs: torch.Tensor, masks: torch.Tensor, first: int = 0
) -> None:
    """logits[seqs[i], v] = −inf where bit t % 32 of masks[i, t // 32] is 0, with t = first + v. Only bans are
    written: logits are not read. Shapes as in the reference."""
    if len(seqs):
        vocab = logits.shape[1]
        grid = (len(seqs), cdiv(vocab, _CHUNK))
        strides = (logits.stride(0), masks.stride(0))
        workspace.launch(_mask, grid)(logits, seqs, masks, *strides, vocab, FIRST=first, CHUNK=_CHUNK, num_warps=4)
