"""Attention over a latent cache, one way for each kind of sequence.

Sequences of one query read the latents as they are, split over programs. Sequences of many queries have their keys and
values made first where the caller left their queries as they are; in a graph they run beside the others, which read
memory. Steps of one kind of sequence alone, and those of many prompt tokens, have kernels on Hopper that fill the
device (`fills_device`).
"""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import latent_views
from kernels.latent_attention import prompt, stream_k, up
from kernels.latent_attention.chunks import attend_chunks
from kernels.latent_attention.expand import Tile, UpTile, attend_expanded
from kernels.latent_attention.split_kv import FEW_SEQS, SplitCut, attend_split_kv
from kernels.latent_attention.stream_k import CombineTile, attend_stream_k
from kernels.workspace import Workspace

# Sequences of one query whose entries are read faster in equal ranges (stream-K) than in splits of each sequence
# (measured on an H200).
STREAM_K_SEQS = range(5, 193)
# From so many of them on, partials are combined by programs of all of a head's values, each partial read once; fewer
# sequences want more programs.
COMBINED_WHOLE = 33
# Tokens of longer sequences beside which sequences of one query wait: more than any graph holds.
DEVICE_FILLING_TOKENS = 4096


def latent_attention(
    workspace: Workspace,
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
    """See the reference. Expanded sequences need heads whose partials are powers of two from 16 on."""
    num_single = batch.num_single
    t, heads, channels = q.shape
    latent = kv_up.shape[-1]
    held = latent_views(cache, keys, latent, latent_scale)
    nope = channels - held.keys.shape[-1]
    out = torch.empty(t, heads, kv_up.shape[1] - nope, dtype=q.dtype, device=q.device)
    if deterministic:
        seqs = (block_table, batch.query_start, batch.context_len)
        attend_chunks(workspace, absorbed, kv_up, held, *seqs, out, scale, 0, batch.max_query, deterministic)
        return out
    longer = len(batch.context_len) > num_single
    expanded = longer and len(absorbed) < t
    whole = fills_device(num_single, t - num_single, heads)
    with workspace.branch(expanded and num_single > 0 and not whole) as wait_for_branch:
        if expanded:
            attend_expanded(workspace,
                q, kv_up, cache, held, block_table, batch.query_start, batch.context_len, out, scale, num_single,
                batch.max_query, max_total_context,
                *expanded_tiles(q, kv_up, cache, nope, whole),
            )  # fmt: skip
        elif longer:
            attend_chunks(
                workspace,
                absorbed,
                kv_up,
                held,
                block_table,
                batch.query_start,
                batch.context_len,
                out,
                scale,
                num_single,
                batch.max_query,
            )
    if whole and num_single in STREAM_K_SEQS and stream_k.suits(absorbed, kv_up, cache):
        attend_stream_k(workspace,
            absorbed[:num_single], kv_up, cache, block_table, batch.context_len, out, scale, num_single,
            combine_tile(num_single),
        )  # fmt: skip
    elif num_single:
        attend_split_kv(workspace,
            absorbed[:num_single], kv_up, held, block_table, batch.context_len, out, scale, num_single,
            batch.max_context,
            split_cut(q.dtype, heads, num_single),
        )  # fmt: skip
    wait_for_branch()
    return out


def fills_device(num_single: int, rest: int, heads: int) -> bool:
    """Whether kernels may take every multiprocessor for themselves, with `rest` tokens of longer sequences and up to 16
    heads: in steps of one kind of sequence, and where longer sequences are so many that sequences of one query gain
    little by running beside them and go behind."""
    return heads <= 16 and (not num_single or not rest or rest >= DEVICE_FILLING_TOKENS)


def combine_tile(seqs: int) -> CombineTile:
    """The cut of combining the partials of so many sequences (measured on an H200 at 16 heads of 128 values)."""
    return CombineTile(values=128) if seqs >= COMBINED_WHOLE else CombineTile()


def split_cut(dtype: torch.dtype, heads: int, seqs: int) -> SplitCut:
    """The cut of sequences of one query (measured on an H200 at 16 heads). Two programs on a multiprocessor fill each
    other's gaps, where a program's heads fit four warps and sequences are many; some sequences want twice the entries
    on their way, for which there is room beside so few heads."""
    if dtype == torch.float32:
        return SplitCut(32, 1, 4)
    if heads <= 16 and seqs > 32:
        return SplitCut(32, 3, 4, programs=2, values=64)
    return SplitCut(64 if heads <= 16 and seqs > FEW_SEQS else 32, 3, 8)


def expanded_tiles(
    q: torch.Tensor, kv_up: torch.Tensor, cache: torch.Tensor, nope: int, whole: bool
) -> tuple[UpTile | None, Tile | None]:
    """The cuts of expanded sequences; None for what Hopper has kernels of its own for, which take the `whole`
    device."""
    if q.dtype == torch.float32:
        return UpTile(64, 64, 32, 2, 4), Tile(64, 32, 2, 4)
    return (
        None if whole and up.suits(kv_up, cache) else UpTile(128, 128, 64, 3, 8),
        None if whole and prompt.suits(q, nope, kv_up.shape[1] - nope) else Tile(128, 64, 3, 8),
    )
