"""From a StepPlan to what the device needs, by arrays: one staging buffer goes up a step, the rest is derived there.

The buffer holds the step's few numbers an entry and a token, then the changes of the tables as (word, value) pairs.
Token ids, block tables and slots are gathered on the device from the tables (`Inputs.batch`), so nothing that is
sampled ever comes back to be sent again. Buffer addresses and the layout for a given (entries, tokens) never change:
`Inputs.batch` and what follows it can be captured in a CUDA graph and replayed after `stage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from engine.cache.spec import PoolSpec
from engine.config import MAX_DRAFTS
from engine.core.plan import StepPlan
from engine.parallel.context import own_tokens
from engine.runner.batch import DeviceBatch, LastTokens, Proposals, SampledEntries
from engine.runner.tables import Change, RowTables, Words
from kernels.select import Ops

# Words for changes of the tables in the fixed buffer; more than this goes up in a buffer of its own.
CHANGE_WORDS = 1 << 16
# Entries of a padded step behind those of one token: chunks of prompts, and at least one dummy entry. The second: where
# the step may take a whole budget.
MULTI_TOKEN_ENTRIES, BUDGET_ENTRIES = 8, 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in the buffer the parts of a staged step stand, and how many words they take together."""

    parts: tuple[slice, ...]
    words: int


# Graphs have some hundreds of shapes. A CPU has a shape for each step, and makes a layout in microseconds.
@lru_cache(maxsize=512)
def layout_of(entries: int, tokens: int, longer: int = 0) -> Layout:
    """Of query_start, context_len, rows, out_rows, last, positions and entries, in the buffer's order. Behind them,
    where `longer` entries may draft, stand each entry's count, start and size, and all proposals: in the step under
    way and in this one an entry drafts so many at most.

    Each starts on 16 bytes, because Triton compiles a kernel anew for a pointer that does not."""
    sizes = [entries + 1, *[entries] * 4, tokens, tokens]
    if longer:
        sizes += [*[entries] * 3, longer * 2 * MAX_DRAFTS]
    parts, start = [], 0
    for size in sizes:
        parts.append(slice(start, start + size))
        start += -(-size // 4) * 4
    return Layout(tuple(parts), start)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step is known on the host and decides which code runs. The bounds are those of DeviceBatch.

    drafts: most tokens that an entry past num_single drafts; 0 when the step has none. drafting: entries past
    num_single, the first of them, that may draft. whole_logits: some entry draws from the logits of all ranks' tokens.
    """

    entries: int
    tokens: int
    num_single: int
    max_query: int
    max_context: int
    max_total_context: int = 0
    drafts: int = 0
    drafting: int = 0
    whole_logits: bool = False

    @property
    def layout(self) -> Layout:
        return layout_of(self.entries, self.tokens, self.entries - self.num_single if self.drafts else 0)

    @classmethod
    def drafted(cls, singles: int, entries: int, depth: int, max_context: int) -> StepShape:
        """What a step of `entries` entries of up to `depth` drafts each, beside `singles` without, is padded to."""
        tokens = singles + entries * (1 + depth)
        # Each entry that drafts less than it might leaves tokens to a dummy entry.
        return cls(singles + 2 * entries, tokens, singles, 1 + depth, max_context, drafts=depth, drafting=entries)


class Inputs:
    """Staging for steps of at most `max_rows` entries and `max_tokens` tokens; `drafts`: they may hold drafts.

    max_entries: of a step, with those that pad it.
    """

    def __init__(
        self,
        tables: RowTables,
        pool: PoolSpec,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        ops: Ops,
        drafts: bool = False,
    ) -> None:
        self._ops = ops
        self._tables = tables
        self._pool = pool
        self._cuda = device.type == "cuda"
        # Dummy entries that pad a prompt, a mixed step or one with drafts come on top of max_rows.
        self.max_entries = max_entries = (4 * max_rows if drafts else max_rows) + BUDGET_ENTRIES
        size = layout_of(max_entries, max_tokens, max_entries if drafts else 0).words
        # Two host buffers: while one is on its way up, the next step is written into the other.
        self._hosts = [self._host(size + CHANGE_WORDS) for _ in range(1 + self._cuda)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._changes = [host[:0] for host in self._hosts]  # held until they are up
        self._sent = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []
        self._turn = 0
        self._words = torch.zeros(size, dtype=torch.int32, device=device) if self._cuda else self._hosts[0]
        self._starts = torch.arange(max_entries + 1, dtype=torch.int32, device=device)

    def stage(self, plan: StepPlan, padded: StepShape | None = None) -> StepShape:
        """Send a plan's numbers and its changes of the tables to the device.

        `padded` is a shape to fill up with dummy entries: of one token each, but for the last, which takes what is
        left.
        """
        changes = [self._tables.start(start) for start in plan.starts]
        if plan.block_writes:
            changes.append(self._tables.block_writes(plan.block_writes))
        if self._cuda:
            self._turn = 1 - self._turn
            self._sent[self._turn].synchronize()
        host, words = self._hosts[self._turn], self._arrays[self._turn]
        shape, end = self._pack(plan, padded, words)
        size = 2 * sum(len(places) for places, _ in changes)
        pairs = host[end : end + size] if size <= CHANGE_WORDS else self._host(size)
        if changes:
            _join(changes, words[end : end + size] if size <= CHANGE_WORDS else pairs.numpy())
        self._changes[self._turn] = pairs
        self._ops.move_words(host[:end], self._words[:end], pairs.view(2, -1), self._tables.arena)
        if self._cuda:
            self._sent[self._turn].record()
        return shape

    def clear(self) -> None:
        """Leave zeros where steps are staged."""
        self._words.zero_()

    def _host(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32, pin_memory=self._cuda)

    def _pack(self, plan: StepPlan, padded: StepShape | None, words: Words) -> tuple[StepShape, int]:
        """Write the plan's numbers as the staging buffer holds them, filled up to `padded`: the shape that they have,
        and how many words they are."""
        dummy = self._tables.dummy
        table = np.array((plan.rows, plan.samples, plan.first, plan.count), np.int32)
        if padded is not None:
            real, table = table, np.empty((4, padded.entries), np.int32)
            table[:] = ((dummy,), (False,), (0,), (1,))
            at = places(plan, padded)
            table[:, at] = real
            if padded.drafts:
                # Dummy entries behind the real ones take what these leave, and no more than a real one can have.
                end, longest = at[-1] + 1, 1 + padded.drafts
                left = padded.tokens - table[3, :end].sum()
                table[3, end:] = np.clip(left - longest * np.arange(padded.entries - end), 0, longest)
            else:
                # Every dummy entry has one token. The last takes what is left; what no row holds, those before it.
                left, entry = int(padded.tokens - table[3].sum()), padded.entries - 1
                room = min(padded.max_query, padded.max_context) - 1
                while left:
                    taken = min(left, room)
                    table[3, entry] += taken
                    left, entry = left - taken, entry - 1
        rows, samples, first, count = table
        held = first + count
        shape = padded or _shape(count, held, max((draft.count for draft in plan.drafts.values()), default=0))
        layout = shape.layout
        parts = [words[part] for part in layout.parts]
        start, lengths, table_rows, out_rows, last, positions, entries = parts[:7]
        if shape.drafts:
            _propose(plan, shape, parts[7:])
        start[0] = 0
        count.cumsum(out=start[1:])
        assert start[-1] == shape.tokens
        lengths[:] = held
        table_rows[:] = rows
        out_rows[:] = np.where(samples, rows, dummy)
        np.subtract(start[1:], 1, out=last)
        entries[:] = np.arange(shape.entries).repeat(count)
        np.add(np.arange(shape.tokens), (first - start[:-1])[entries], out=positions, casting="same_kind")
        return shape, layout.words

    def batch(self, shape: StepShape) -> DeviceBatch:
        """The staged step as the decoder sees it: gathers on the device, no copy from the host."""
        query_start, context_len, rows, _, _, positions, entries = self._parts(shape, 0, 7)
        batch = self._gather_batch(shape, query_start, context_len, rows, positions, entries)
        return replace(batch, deferred=[]) if shape.drafts and self._pool.num_state_slots else batch

    def single_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, behind: torch.Tensor, max_context: int
    ) -> DeviceBatch:
        """A step of entries of one token: row and position of each, and the position behind it, [B] int32."""
        count = len(rows)
        shape = StepShape(count, count, count, 1, max_context)
        entries = self._starts[:count]
        return self._gather_batch(shape, self._starts[: count + 1], behind, rows, positions, entries)

    def _gather_batch(
        self,
        shape: StepShape,
        query_start: torch.Tensor,
        context_len: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        entries: torch.Tensor,
    ) -> DeviceBatch:
        """What the decoder reads of a step, gathered from the tables; arguments as in `DeviceBatch`."""
        size = self._pool.block_size
        token_ids, tables, slots = None, [], []
        none = self._words[:0].long()
        for table in self._tables.blocks:
            if table.shape[1]:
                token_ids, places, own = self._ops.token_inputs(
                    self._tables.tokens, table, rows, entries, positions, size
                )
            else:
                places, own = none, table.new_empty(shape.entries, 0)
            tables.append(own)
            slots.append(places)
        if token_ids is None:
            token_ids = self._tables.tokens[rows[entries], positions]
        held = self._tables.params.state_slots
        states = held.index_select(0, rows) if self._pool.num_state_slots else none
        return DeviceBatch(
            token_ids=token_ids,
            positions=positions,
            entries=entries,
            query_start=query_start,
            context_len=context_len,
            block_tables=tuple(tables),
            slots=tuple(slots),
            state_slots=states,
            num_single=shape.num_single,
            max_query=shape.max_query,
            max_context=shape.max_context,
            max_total_context=shape.max_total_context,
            own=None if self._pool.ranks == 1 else own_tokens(slots, positions, self._pool),
        )

    def entries(self, shape: StepShape) -> SampledEntries:
        """The staged step as the sampler sees it."""
        lengths, rows, out_rows = self._parts(shape, 1, 4)
        return SampledEntries(rows, out_rows, lengths)

    def tokens(self, shape: StepShape) -> SampledEntries:
        """As if each of the staged step's tokens were the last of an entry of its own, each [T]."""
        rows, out_rows, _, positions, entries = self._parts(shape, 2, 7)
        return SampledEntries(rows.index_select(0, entries), out_rows.index_select(0, entries), positions + 1)

    def proposals(self, shape: StepShape) -> Proposals:
        """What the entries of a staged step with drafts propose."""
        count, start, size, tokens = self._parts(shape, 7, 11)
        return Proposals(count, start, size, tokens.view(shape.entries - shape.num_single, -1))

    def begin_at_true_ends(self, shape: StepShape) -> None:
        """Move entries that draw to where their rows truly end: the plan counted on drafts which may not have stood."""
        query_start, lengths, rows, out_rows, _, positions = self._parts(shape, 0, 6)
        counts = self.proposals(shape).count if shape.drafts else None
        self._ops.shift_entries(
            lengths, positions, rows, out_rows, query_start, counts, self._tables.lengths, self._tables.dummy
        )

    def last_indices(self, shape: StepShape) -> torch.Tensor:
        """Place of each entry's last token, [B] int32."""
        return self._parts(shape, 4, 5)[0]

    def _parts(self, shape: StepShape, first: int, stop: int) -> list[torch.Tensor]:
        """Of what is staged, in the buffer's order."""
        return [self._words[part] for part in shape.layout.parts[first:stop]]

    def last_tokens(self, shape: StepShape) -> LastTokens | None:
        """The staged step's last token of each entry; None when no entry has two."""
        if shape.num_single == shape.entries:
            return None
        return LastTokens(self.last_indices(shape), self._starts[: shape.entries + 1])


def places(plan: StepPlan, padded: StepShape) -> list[int]:
    """Where a plan's entries stand in a padded step: those of one token, dummies up to num_single, then the rest."""
    singles = plan.count.count(1) if padded.num_single else 0
    return [*range(singles), *range(padded.num_single, padded.num_single + len(plan.rows) - singles)]


def _shape(count: Words, held: Words, drafts: int) -> StepShape:
    """Of entries that are not padded: their tokens, and what they hold with them."""
    singles = int((count == 1).sum())
    return StepShape(
        entries=len(count),
        tokens=int(count.sum()),
        num_single=singles,
        max_query=int(count.max()),
        max_context=int(held.max()),
        max_total_context=int(held[singles:].sum()),
        drafts=drafts,
        drafting=len(count) - singles if drafts else 0,
    )


def _propose(plan: StepPlan, shape: StepShape, parts: Sequence[Words]) -> None:
    """Write what the plan's entries draft where it goes up."""
    count, start, size, words = parts
    for part in parts:
        part.fill(0)
    tokens = words.reshape(shape.entries - shape.num_single, -1)
    behind = shape.num_single - plan.count.count(1)
    for entry, draft in plan.drafts.items():
        place, held = entry + behind, len(draft.tokens)
        count[place], start[place], size[place] = draft.count, draft.start, held
        tokens[place - shape.num_single, :held] = draft.tokens


def _join(changes: Sequence[Change], out: Words) -> None:
    """All words, then all values."""
    half = len(out) // 2
    np.concatenate([words for words, _ in changes], out=out[:half])
    np.concatenate([values for _, values in changes], out=out[half:])
