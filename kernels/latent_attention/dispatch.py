"""Which kernels attend over a latent cache, decided once a shape: for sequences of one query, and for longer ones.
Thresholds and tiles were measured on an H200.

Sequences of one query read the latents as they are, split over programs. Longer ones have their keys and values made
first where the caller left their queries as they are. Steps of one kind of sequence alone, and those of many prompt
tokens, have kernels on Hopper that fill the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import LatentViews
from kernels.dispatch import Dispatch, Variant
from kernels.latent_attention.chunks import attend_chunks
from kernels.latent_attention.expand import Tile, UpTile, attend_expanded
from kernels.latent_attention.split_kv import FEW_SEQS, SplitCut, attend_split_kv
from kernels.latent_attention.stream_k import CombineTile, attend_stream_k
from kernels.tuned.tables import DEFAULT, numbers, tiles
from kernels.workspace import Workspace

OP = "latent_attention"


class SingleProblem(NamedTuple):
    """What the choice of a kernel for `seqs` sequences of one query depends on.

    fills_device: kernels may take every multiprocessor for themselves. streams: the stream-K kernel reads such a cache,
    on a GPU of its kind. table: of tuned numbers.
    """

    dtype: torch.dtype
    heads: int
    seqs: int
    fills_device: bool
    streams: bool
    table: str = DEFAULT


class LongerProblem(NamedTuple):
    """What the choice of kernels for longer sequences depends on.

    expanded: their queries were left as they are. up, prompts: the kernels of those names on Hopper may take the whole
    device, and take these keys and values, and these queries.
    """

    dtype: torch.dtype
    expanded: bool
    up: bool
    prompts: bool
    deterministic: bool


class Operands(NamedTuple):
    """What kernels are launched on: as in the reference, with the parts of the cache apart, and the output."""

    workspace: Workspace
    out: torch.Tensor
    q: torch.Tensor
    absorbed: torch.Tensor
    kv_up: torch.Tensor
    cache: torch.Tensor
    held: LatentViews
    block_table: torch.Tensor
    batch: AttentionBatch
    scale: float
    max_total_context: int


class ExpandedCut(NamedTuple):
    """How keys and values are made, and how they are attended to; None: by Hopper's own kernel."""

    up: UpTile | None
    tile: Tile | None


def fills_device(num_single: int, rest: int, heads: int, table: str = DEFAULT) -> bool:
    """Whether kernels may take every multiprocessor for themselves, with `rest` tokens of longer sequences and up to 16
    heads: in steps of one kind of sequence, and where longer sequences are so many that sequences of one query gain
    little by running beside them and go behind: more than any graph holds."""
    many = numbers(table, OP)["device_filling_tokens"]
    return heads <= 16 and (not num_single or not rest or rest >= many)


def streamed(seqs: int, table: str) -> bool:
    """Whether entries of so many sequences are read faster in equal ranges (stream-K) than in splits of each."""
    first, last = numbers(table, OP)["stream_k_seqs"]
    return bool(first <= seqs <= last)


def combine_tile(seqs: int, table: str = DEFAULT) -> CombineTile:
    """The cut of combining the partials of so many sequences (measured at 16 heads of 128 values). Many take programs
    of all of a head's values, each partial read once; fewer want more programs."""
    made = tiles(table, OP, "combine_tiles", CombineTile)
    return made["whole" if seqs >= numbers(table, OP)["combined_whole"] else "few"]


def split_cut(dtype: torch.dtype, heads: int, seqs: int, table: str = DEFAULT) -> SplitCut:
    """The cut of sequences of one query (measured at 16 heads). Two programs on a multiprocessor fill each other's
    gaps, where a program's heads fit four warps and sequences are many; some sequences want twice the entries on their
    way, for which there is room beside so few heads."""
    made = tiles(table, OP, "split_cuts", SplitCut)
    if dtype == torch.float32:
        return made["wide"]
    if heads <= 16 and seqs > 32:
        return made["many"]
    return made["some" if heads <= 16 and seqs > FEW_SEQS else "few"]


def expanded_cut(problem: LongerProblem) -> ExpandedCut:
    if problem.dtype == torch.float32:
        return ExpandedCut(UpTile(64, 64, 32, 2, 4), Tile(64, 32, 2, 4))
    up = None if problem.up else UpTile(128, 128, 64, 3, 8)
    return ExpandedCut(up, None if problem.prompts else Tile(128, 64, 3, 8))


def _not_stream_k(problem: SingleProblem) -> str | None:
    if not problem.fills_device:
        return "for steps of one kind of sequence, or many prompt tokens, of up to 16 heads"
    if not streamed(problem.seqs, problem.table):
        first, last = numbers(problem.table, OP)["stream_k_seqs"]
        return f"for {first} to {last} sequences"
    return None if problem.streams else "needs Hopper, a 16-bit cache and whole slabs of channels"


def _stream_k(operands: Operands, combine: CombineTile) -> None:
    workspace, out, _, absorbed, kv_up, cache, _, block_table, batch, scale, _ = operands
    seqs = batch.num_single
    given = (kv_up, cache, block_table, batch.context_len, out, scale, seqs, combine)
    attend_stream_k(workspace, absorbed[:seqs], *given)


def _split_kv(operands: Operands, cut: SplitCut) -> None:
    workspace, out, _, absorbed, kv_up, _, held, block_table, batch, scale, _ = operands
    seqs = batch.num_single
    given = (kv_up, held, block_table, batch.context_len, out, scale, seqs, batch.max_context, cut)
    attend_split_kv(workspace, absorbed[:seqs], *given)


def _expanded(operands: Operands, cut: ExpandedCut) -> None:
    workspace, out, q, _, kv_up, cache, held, block_table, batch, scale, max_total_context = operands
    lengths = (batch.query_start, batch.context_len)
    bounds = (batch.num_single, batch.max_query, max_total_context)
    attend_expanded(workspace, q, kv_up, cache, held, block_table, *lengths, out, scale, *bounds, cut.up, cut.tile)


def _chunks(operands: Operands, deterministic: bool) -> None:
    """All sequences where sums must not depend on the batch."""
    workspace, out, _, absorbed, kv_up, _, held, block_table, batch, scale, _ = operands
    seqs = (block_table, batch.query_start, batch.context_len)
    first = 0 if deterministic else batch.num_single
    attend_chunks(workspace, absorbed, kv_up, held, *seqs, out, scale, first, batch.max_query, deterministic)


SINGLES: Dispatch[SingleProblem] = Dispatch(
    [
        Variant(
            "stream_k",
            _not_stream_k,
            lambda problem: combine_tile(problem.seqs, problem.table),
            _stream_k,
            "docs/experiments/2026-11-22-latent-attention.md (latents.jsonl)",
        ),
        Variant(
            "split_kv",
            lambda problem: None,
            lambda problem: split_cut(problem.dtype, problem.heads, problem.seqs, problem.table),
            _split_kv,
            "docs/experiments/2026-11-22-latent-attention.md (decode-writes.jsonl)",
        ),
    ]
)

LONGER: Dispatch[LongerProblem] = Dispatch(
    [
        Variant(
            "invariant",
            lambda problem: None if problem.deterministic else "for runtime.deterministic",
            lambda problem: True,
            _chunks,
            "not the fastest: each output is the same sum in any batch; docs/performance.md, batch invariance",
        ),
        Variant(
            "expanded",
            lambda problem: None if problem.expanded else "for queries that were not absorbed",
            expanded_cut,
            _expanded,
            "docs/experiments/2026-11-22-latent-attention.md (latents.jsonl), prompts",
        ),
        Variant(
            "chunks",
            lambda problem: None,
            lambda problem: False,
            _chunks,
            "for steps whose lengths the host does not know; docs/experiments/2026-11-22-latent-attention.md",
        ),
    ]
)
