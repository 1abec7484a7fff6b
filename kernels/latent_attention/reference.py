"""Attention of a mixed batch over a latent cache (DeepSeek-V2 2024, arXiv:2405.04434)."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import latent_views, plain
from kernels.sequences import own_sequences


def latent_attention(
    q: torch.Tensor,
    absorbed: torch.Tensor,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    max_total_context: int = 0,
    deterministic: bool = False,
    keys: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> torch.Tensor:
    """With c = (latent, rotated key) an entry and (k_up, v_up) a head's halves of the up-projection:
    s = scale · (q_plain · k_up latent + q_rope · key),   o = Σ softmax(s) · v_up latent.

    Sequence i's queries are the last query_start[i+1] − query_start[i] of its context_len[i] tokens and see no later
    token. q [T, H, D + P] (rotated, may be a view); absorbed [A, H, L + P] is (k_upᵀ q_plain, q_rope) of the first A
    tokens, as `latent_write` gives it: all of them, or those of the first `num_single` sequences, which have one query
    each; kv_up [H, D + V, L]; cache [N, block_size, L + P]; block_table [B, M] int32; query_start [B+1], context_len
    [B] int32 → [T, H, V] in q's dtype, computed in float32; what stands between two products may be rounded to q's
    dtype. No sequence has more than `max_query` queries or `max_context` tokens. Sequences past num_single are
    expanded, that is their keys and values made, when A < T; they hold at most `max_total_context` tokens together. A
    sequence of context_len 0 gives zeros.
    keys [N, block_size, P]: the rotated keys, where cache [N, block_size, L] holds latents over latent_scale alone.
    deterministic: a query's result has the same bits whatever else the batch holds and however prompts are chunked;
    absorbed holds all tokens.
    """
    query_start, context_len = batch.query_start, batch.context_len
    block_size, latent = cache.shape[1], kv_up.shape[-1]
    held = latent_views(cache, keys, latent, latent_scale)
    nope = q.shape[-1] - held.keys.shape[-1]
    k_up, v_up = kv_up[:, :nope].float(), kv_up[:, nope:].float()
    out = torch.zeros(len(q), q.shape[1], v_up.shape[1], dtype=torch.float32, device=q.device)
    if deterministic:
        seq, query_start, context_len = own_sequences(query_start, context_len)
        block_table = block_table[seq]
    starts, lens = query_start.tolist(), context_len.tolist()
    for i, length in enumerate(lens):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo or length == 0:
            continue
        blocks = block_table[i, : -(-length // block_size)].long()
        latents = plain(held.latents)[blocks].view(cache.dtype)
        views = (latents.float() * latent_scale, held.keys[blocks].float())
        entries = torch.cat(views, dim=-1).flatten(0, 1)[:length]
        own = q[lo:hi].float()
        taken = torch.einsum("thd,hdl->thl", own[..., :nope], k_up)
        s = torch.einsum("thl,nl->thn", torch.cat((taken, own[..., nope:]), dim=-1), entries) * scale
        p = torch.arange(length - (hi - lo), length, device=q.device)[:, None, None]
        s = s.masked_fill(torch.arange(length, device=q.device) > p, float("-inf"))
        o = torch.einsum("thn,nl->thl", torch.softmax(s, dim=-1), entries[:, :latent])
        out[lo:hi] = torch.einsum("thl,hvl->thv", o, v_up)
    return out.to(q.dtype)
