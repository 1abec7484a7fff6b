"""A head that drafts from the model's hidden states, in the same steps and graphs. Its keys and values lie in the same
pool, in blocks that are given, shared and taken back with the model's.

At the end of a step it computes the step's tokens once more, each with the one drawn or known behind it. What it
computed for a row's last token stays on the device, and the next step's drafts begin with it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.cache.tensors import LayerCache
from engine.layers.embedding import Embedding
from engine.models.draft_heads import DraftHead
from engine.runner.batch import DeviceBatch, LastTokens
from engine.runner.drafting import Verify
from engine.runner.inputs import Inputs, StepShape
from engine.runner.tables import RowTables
from engine.sampling.sampler import PLAIN, Sampler
from kernels.select import Ops


class HeadDrafter:
    """Draws drafts as the model draws tokens, by the same noise. caches are those of the head's layers.

    _states [rows, hidden]: what the head made of each row's last token but one and the last.
    """

    def __init__(
        self,
        head: DraftHead,
        embed: Embedding,
        caches: tuple[tuple[LayerCache, ...], ...],
        ops: Ops,
        inputs: Inputs,
        tables: RowTables,
    ) -> None:
        self._head = head
        self._embed = embed if head.embed is None else head.embed
        self._caches = caches
        self._ops = ops
        self._sampler = Sampler(ops, head.vocabulary)
        self._inputs = inputs
        self._tables = tables
        self._states = torch.zeros(tables.dummy + 1, head.width, dtype=head.dtype, device=tables.arena.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._head.taps

    def follow(
        self,
        batch: DeviceBatch,
        seen: torch.Tensor,
        shape: StepShape,
        verify: Verify | None,
        last_kept: torch.Tensor | None,
        trims: bool,
    ) -> None:
        """Compute the tokens of a step whose draws are in the token table. seen: what `Decoder.tapped` saw of them.
        last_kept [B] int32: place of the last token that is kept of each entry of a step with drafts. trims: let the
        last layer give each entry's last token alone."""
        inputs, entries = self._inputs, self._inputs.entries(shape)
        last_tokens = inputs.last_tokens(shape)
        hidden = self._head.combine(seen)
        tokens = inputs.tokens(shape) if verify is None or verify.places is not None else verify.draws
        within = last_tokens if trims and verify is None else None
        x = self._compute(tokens.rows, tokens.lengths, hidden, batch, within)
        if verify is not None:
            assert last_kept is not None
            x = x.index_select(0, last_kept)
        elif within is None and last_tokens is not None:
            x = x.index_select(0, last_tokens.places)
        self._states[entries.out_rows] = x

    def propose(self, shape: StepShape) -> None:
        """Put drafts for the staged step into the token table, whose entries begin at their true ends. An entry that
        wants no more of them computes a dummy token."""
        tables, first, end = self._tables, shape.num_single, shape.num_single + shape.drafting
        count, entries = self._inputs.proposals(shape).count[first:end], self._inputs.entries(shape)
        own, lengths = entries.rows[first:end], entries.lengths[first:end]
        x = self._states.index_select(0, own)
        places = self._ops.draft_places(lengths, count, own, shape.drafts, tables.dummy)
        for drafted, (rows, before, newest, behind) in enumerate(places.unbind(1)):
            if drafted:
                batch = self._inputs.single_tokens(rows, before, newest, shape.max_context)
                x = self._compute(rows, newest, x, batch)
            logits = self._head.logits(x)
            of = (tables.params, rows, behind, tables.tokens, PLAIN)
            drawn = self._sampler.draw(logits, *of, shape.whole_logits)
            self._ops.keep_tokens(drawn.tokens, tables.tokens, rows, behind)

    def _compute(
        self,
        rows: torch.Tensor,
        behind: torch.Tensor,
        hidden: torch.Tensor,
        batch: DeviceBatch,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        """What the head makes of the batch's tokens, each with the one at the place `behind` in its row."""
        ids = self._tables.tokens[rows, behind]
        return self._head(self._embed(ids), hidden, replace(batch, token_ids=ids), self._caches, last_tokens)
