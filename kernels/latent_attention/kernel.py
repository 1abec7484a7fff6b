"""Attention over a latent cache, one way for each kind of line.

Lines of one query read the latents as they are, split over programs. Lines of many queries have their keys and values
made first where the caller left their queries as they are; in a graph they run beside the others, which read memory.
Steps of one kind of line alone, and those of many prompt tokens, have kernels on Hopper that fill the device
(`fills_device`).
"""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import latent_parts
from kernels.latent_attention import prompt, stretches, up
from kernels.latent_attention.chunks import attend_chunks
from kernels.latent_attention.expand import Tile, UpTile, attend_expanded
from kernels.latent_attention.steps import FEW_LINES, StepCut, attend_steps
from kernels.latent_attention.stretches import JoinTile, attend_stretches
from kernels.workspace import Workspace

# Lines of one query whose entries are read faster in equal stretches than in parts of each line (measured on an H200).
STRETCHED_LINES = range(5, 193)
# From so many of them on, parts are joined by programs of all of a head's values, each part read once; fewer lines want
# more programs.
JOINED_WHOLE = 33
# Tokens of longer lines beside which lines of one query wait: more than any graph holds.
MANY_TOKENS = 4096


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
    """See the reference. Expanded lines need heads whose parts are powers of two from 16 on."""
    num_single = batch.num_single
    t, heads, channels = q.shape
    latent = kv_up.shape[-1]
    held = latent_parts(cache, keys, latent, latent_scale)
    nope = channels - held.keys.shape[-1]
    out = torch.empty(t, heads, kv_up.shape[1] - nope, dtype=q.dtype, device=q.device)
    if deterministic:
        lines = (block_table, batch.query_start, batch.context_len)
        attend_chunks(workspace, absorbed, kv_up, held, *lines, out, scale, 0, batch.max_query, deterministic)
        return out
    longer = len(batch.context_len) > num_single
    expanded = longer and len(absorbed) < t
    whole = fills_device(num_single, t - num_single, heads)
    with workspace.branch(expanded and num_single > 0 and not whole) as join:
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
    if whole and num_single in STRETCHED_LINES and stretches.suits(absorbed, kv_up, cache):
        attend_stretches(workspace,
            absorbed[:num_single], kv_up, cache, block_table, batch.context_len, out, scale, num_single,
            join_tile(num_single),
        )  # fmt: skip
    elif num_single:
        attend_steps(workspace,
            absorbed[:num_single], kv_up, held, block_table, batch.context_len, out, scale, num_single,
            batch.max_context,
            step_cut(q.dtype, heads, num_single),
        )  # fmt: skip
    join()
    return out


def fills_device(num_single: int, rest: int, heads: int) -> bool:
    """Whether kernels may take every multiprocessor for themselves, with `rest` tokens of longer lines and up to 16
    heads: in steps of one kind of line, and where longer lines are so many that lines of one query gain little by
    running beside them and go behind."""
    return heads <= 16 and (not num_single or not rest or rest >= MANY_TOKENS)


def join_tile(lines: int) -> JoinTile:
    """The cut of joining the parts of so many lines (measured on an H200 at 16 heads of 128 values)."""
    return JoinTile(values=128) if lines >= JOINED_WHOLE else JoinTile()


def step_cut(dtype: torch.dtype, heads: int, lines: int) -> StepCut:
    """The cut of lines of one query (measured on an H200 at 16 heads). Two programs on a multiprocessor fill each
    other's gaps, where a program's heads fit four warps and lines are many; some lines want twice the entries on
    their way, for which there is room beside so few heads."""
    if dtype == torch.float32:
        return StepCut(32, 1, 4)
    if heads <= 16 and lines > 32:
        return StepCut(32, 3, 4, programs=2, values=64)
    return StepCut(64 if heads <= 16 and lines > FEW_LINES else 32, 3, 8)


def expanded_tiles(
    q: torch.Tensor, kv_up: torch.Tensor, cache: torch.Tensor, nope: int, whole: bool
) -> tuple[UpTile | None, Tile | None]:
    """The cuts of expanded lines; None for what Hopper has kernels of its own for, which take the `whole` device."""
    if q.dtype == torch.float32:
        return UpTile(64, 64, 32, 2, 4), Tile(64, 32, 2, 4)
    return (
        None if whole and up.suits(kv_up, cache) else UpTile(128, 128, 64, 3, 8),
        None if whole and prompt.suits(q, nope, kv_up.shape[1] - nope) else Tile(128, 64, 3, 8),
    )
