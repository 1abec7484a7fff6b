"""A small model that drafts: it computes every token that the large one computes, and before a step with drafts a few
more. Its keys and values lie in the same pool, in blocks that are given, shared and taken back with the large one's."""

from __future__ import annotations

from engine.cache.tensors import LayerCache
from engine.models.decoder import Decoder
from engine.runner.batch import DeviceBatch, LastTokens
from engine.runner.inputs import Inputs, StepShape
from engine.runner.tables import RowTables
from engine.sampling.sampler import PLAIN, Sampler
from kernels.select import Ops


class DraftModel:
    """Draws drafts as the large model draws tokens, by the same noise: where the two agree on what is likely, they draw
    the same. caches are those of its layers."""

    def __init__(
        self, decoder: Decoder, caches: tuple[tuple[LayerCache, ...], ...], ops: Ops, inputs: Inputs, tables: RowTables
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._ops = ops
        self._sampler = Sampler(ops, decoder.vocabulary)
        self._inputs = inputs
        self._tables = tables

    def follow(self, batch: DeviceBatch, last_tokens: LastTokens | None, briefly: bool) -> None:
        """Compute the tokens of a step of the large model. briefly: one layer of each kind, for a warm-up."""
        self._decoder(batch, self._caches, self._decoder.warmup_layers if briefly else None, last_tokens)

    def propose(self, shape: StepShape, briefly: bool) -> None:
        """Put drafts for the staged step into the token table, whose entries begin at their true ends. An entry that
        wants no more of them computes a dummy token."""
        tables, first, end = self._tables, shape.num_single, shape.num_single + shape.drafting
        count, entries = self._inputs.proposals(shape).count[first:end], self._inputs.entries(shape)
        own, lengths = entries.rows[first:end], entries.lengths[first:end]
        only = self._decoder.warmup_layers if briefly else None
        places = self._ops.draft_places(lengths, count, own, shape.drafts, tables.dummy)
        for rows, _, newest, behind in places.unbind(1):
            x = self._decoder(self._inputs.single_tokens(rows, newest, behind, shape.max_context), self._caches, only)
            logits = self._decoder.logits(x)
            drawn = self._sampler.draw(logits, tables.params, rows, behind, tables.tokens, PLAIN)
            self._ops.keep_tokens(drawn.tokens, tables.tokens, rows, behind)
