# mypy: disable-error-code="no-untyped-def"
"""Attention of single queries over a part of what they read: the splits of `latent_attention`, combined as latents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_scales import latent_views
from kernels.latent_attention.dispatch import split_cut
from kernels.latent_attention.split_kv import _split_size, attend_splits
from kernels.workspace import Workspace

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["seqs", "splits", "programs"], do_not_specialize_on_alignment=["context_len"])
def _combine_latents(
    partials,
    sums,
    context_len,
    out,
    lse,
    seqs,
    splits,
    programs,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one sequence: its splits, weighted by their softmax sums."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    l = tl.arange(0, BLOCK_L)
    length = tl.load(context_len + seq)
    active = tl.cdiv(length, _split_size(length, context_len, seqs, splits, programs, BLOCK_N, BLOCK_B))
    if PDL:
        gdc_wait()
    best = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_L,), tl.float32)
    for split in range(0, active):
        place = (seq * splits + split) * HEADS + head
        logsum = tl.load(sums + place)
        partial = tl.load(partials + place * LATENT + l, mask=l < LATENT, other=0.0)
        top = tl.maximum(best, logsum)
        weight = tl.exp2(logsum - top)
        fade = tl.exp2(best - top)
        acc = acc * fade + partial * weight
        total = total * fade + weight
        best = top
    own = seq * HEADS + head
    tl.store(out + own * LATENT + l, acc / tl.where(total == 0.0, 1.0, total), mask=l < LATENT)
    there = tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(lse + own, tl.where(total == 0.0, float("-inf"), (best + there) * LN2))


def latent_partials(
    workspace: Workspace,
    absorbed: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    latent: int,
    max_context: int,
    keys: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    seqs, heads, _ = absorbed.shape
    out = torch.empty(seqs, heads, latent, dtype=torch.float32, device=absorbed.device)
    lse = torch.empty(seqs, heads, dtype=torch.float32, device=absorbed.device)
    if not seqs:
        return out, lse
    held, cut = latent_views(cache, keys, latent, latent_scale), split_cut(absorbed.dtype, heads, seqs)
    made = attend_splits(
        workspace, absorbed.contiguous(), held, block_table, context_len, scale, seqs, max_context, cut
    )
    workspace.launch(_combine_latents, (heads, seqs))(
        made.partials, made.sums, context_len, out, lse, seqs, made.splits, made.programs, HEADS=heads, LATENT=latent,
        BLOCK_L=made.block_l, BLOCK_N=made.keys, BLOCK_B=made.block_b, PDL=workspace.pdl, launch_pdl=workspace.pdl,
        num_warps=4,
    )  # fmt: skip
    return out, lse
