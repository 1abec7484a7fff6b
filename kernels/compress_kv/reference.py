"""Compressed key-value entries: a gated mean of each window of tokens (DeepSeek-V4 2026, §2.3)."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.rotate_tail.reference import turn


def compress_kv(
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    ratio: int,
    eps: float = 1e-6,
    deterministic: bool = False,
) -> None:
    """For each window w of `ratio` tokens of a sequence that this step completes, the cache takes the entry
        turned(rms_norm(Σⱼ softmaxⱼ(gateⱼ + biasⱼ) ∘ kvⱼ) ∘ norm),  at the angle of position w · ratio.

    j runs over the window's tokens. With C = 2D it also runs over those of window w − 1: these give the first D
    channels of kv, gate and bias, the window's own give the last D; window 0 has no predecessor.

    kv, gate [T, C]; bias [ratio, C]; norm [D]; cos_sin [*, R] float32; slots [T] int64 (block · block_size + offset,
    negative writes nothing); cache [N, block_size / ratio, D], written in place at block and offset // ratio;
    state [S, P, 2, C] with P ≥ C / D · ratio: kv and gate of the token at position p in place p % P, read for tokens
    before the sequence's, and written; state_slots [B] int64; query_start [B+1], context_len [B] int32. The next step
    may begin up to P − C / D · ratio tokens before the end of this one, and then writes the entries behind again.
    Computed in float32, rounded once.
    deterministic: an entry has the same bits however the tokens of its windows came.
    """
    c, d = kv.shape[1], norm.shape[0]
    size = state.shape[1]
    per_block = cache.shape[1]
    starts, lens, state_rows = batch.query_start.tolist(), batch.context_len.tolist(), state_slots.tolist()
    for i, row in enumerate(state_rows):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo:
            continue
        first = lens[i] - (hi - lo)
        raw = torch.stack((kv[lo:hi], gate[lo:hi]), dim=1)
        known = min(size, first)
        past = state[row, torch.arange(first - known, first, device=kv.device) % size].to(raw.dtype)
        seq = torch.cat((past, raw)).float()
        origin = first - known
        for w in range(first // ratio, lens[i] // ratio):
            own = seq[w * ratio - origin : (w + 1) * ratio - origin]
            values, gates = own[:, 0, c - d :], own[:, 1, c - d :] + bias[:, c - d :].float()
            if c > d and w > 0:
                before = seq[(w - 1) * ratio - origin : w * ratio - origin]
                values = torch.cat((before[:, 0, :d], values))
                gates = torch.cat((before[:, 1, :d] + bias[:, :d].float(), gates))
            entry = (torch.softmax(gates, dim=0) * values).sum(dim=0)
            entry = entry * torch.rsqrt(entry.square().mean() + eps) * norm.float()
            cos, sin = cos_sin[w * ratio].chunk(2)
            slot = int(slots[lo + (w + 1) * ratio - 1 - first])
            if slot >= 0:
                place = slot // ratio
                cache[place // per_block, place % per_block] = turn(entry, cos, sin).to(cache.dtype)
        kept = min(size, hi - lo)
        state[row, torch.arange(lens[i] - kept, lens[i], device=kv.device) % size] = raw[-kept:].to(state.dtype)
