"""Query and key norm, rotary embedding, KV write and attention of a step (Su et al. 2021; Kwon et al. 2023)."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.paged_attention.reference import paged_attention
from kernels.rope import Rope
from kernels.rope_kv_write.reference import rope_kv_write


def rope_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    fused: bool = True,
    scales: CacheScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_kv_write`, then `paged_attention` of its queries over the caches that it has written.

    A sequence's last token is the last of its context, and has a slot unless the sequence is padding (context_len 0).
    qkv [T, (H + 2G)·D] → [T, H, D] in qkv's dtype; k_cache, v_cache [N, G, block_size, D] are written in place; the
    other arguments are those of the two ops. `fused` allows one kernel to do both for sequences of one token.
    """
    num_heads = qkv.shape[1] // k_cache.shape[-1] - 2 * k_cache.shape[1]
    q = rope_kv_write(qkv, positions, slots, rope, k_cache, v_cache, num_heads, scales=scales)
    return paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        batch,
        scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        scales=scales,
    )
