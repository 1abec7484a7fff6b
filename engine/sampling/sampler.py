"""From logits to tokens: edits, penalties, the draw, and log-probabilities of the logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.parallel.vocabulary import Vocabulary
from engine.sampling.logits import EntryEdits, edit
from engine.sampling.params import RowParams
from engine.types import SamplingParams
from kernels.sample_candidates.reference import MAX_TOP_K
from kernels.select import Ops


@dataclass(frozen=True, slots=True)
class EntryMasks:
    """Which tokens some entries may draw: entries [n] int32, bits [n, W] int32 as `mask_logits` takes them."""

    entries: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingExtras:
    """What a step's entries ask for beyond a draw. `plain` ones leave the draw to the device alone.

    num_logprobs: the most that an entry asked for, or None. masks: what some entries may draw alone.
    """

    edits: Sequence[EntryEdits] = ()
    penalties: bool = False
    num_logprobs: int | None = None
    masks: EntryMasks | None = None

    @property
    def plain(self) -> bool:
        return not self.edits and not self.penalties and self.masks is None


PLAIN = SamplingExtras()


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens [B] integers, −1 where an entry's logits are not finite or nothing is allowed.

    ids, logprobs, ranks [B, k + 1] as the `logprobs` op gives them, or None. given: of a step with drafts, how many
    tokens each of its entries gave.
    """

    tokens: torch.Tensor
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    given: torch.Tensor | None = None


class Sampler:
    """Draws by Gumbel-max noise keyed by (seed, position): the same draw alone, in a batch, and when replayed.

    Of a vocabulary that ranks share each edits its own logits, then says what they may draw (`sample_candidates`).
    Where that is not enough all put their logits together.
    """

    def __init__(self, ops: Ops, vocabulary: Vocabulary) -> None:
        self._ops = ops
        self._vocabulary = vocabulary

    def needs_whole_logits(self, params: SamplingParams) -> bool:
        """Whether candidates of ranks do not say what a request of these draws: it filters, and not by a small
        top_k."""
        if not self._vocabulary.merges or params.greedy:
            return False
        by_count = 0 < params.top_k < self._vocabulary.total
        if by_count and params.top_k <= MAX_TOP_K:
            return False
        return by_count or params.top_p < 1 or params.min_p > 0

    def draw(
        self,
        logits: torch.Tensor,
        params: RowParams,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        token_table: torch.Tensor,
        extras: SamplingExtras,
        whole: bool = False,
    ) -> Drawn:
        """logits [B, C] of this rank's tokens; rows, lengths [B] int32: of each entry, its row of token_table [R, L]
        int32 and of params. whole: some of the rows `needs_whole_logits`.

        As in vLLM, edits come before penalties, penalties before temperature, and logprobs see none of them. Masks come
        behind edits: what they forbid no bias allows.
        """
        final = logits
        if not extras.plain:
            final = logits.to(torch.float32, copy=True)
        if extras.edits:
            edit(final, extras.edits, lengths)
        if extras.masks is not None:
            self._ops.mask_logits(final, extras.masks.entries, extras.masks.bits, self._vocabulary.start)
        if extras.penalties:
            self._ops.penalties(
                final,
                token_table,
                rows,
                params.num_prompt,
                lengths,
                params.repetition,
                params.presence,
                params.frequency,
                self._vocabulary.start,
            )
        filters = (params.temperature, params.top_k, params.top_p, params.min_p, params.seeds)
        if self._vocabulary.merges and not whole:
            tokens = self._merged(final, params, rows, lengths)
            everything = None
        else:
            everything = self._vocabulary.whole(final)
            tokens = self._ops.sample(everything, rows, *filters, lengths)
        if extras.num_logprobs is None:
            return Drawn(tokens)
        if everything is None or final is not logits:
            everything = self._vocabulary.whole(logits)
        return self.with_logprobs(everything, Drawn(tokens), extras.num_logprobs)

    def _merged(
        self, logits: torch.Tensor, params: RowParams, rows: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [B] from what each rank may draw of its own."""
        of, total = self._vocabulary, self._vocabulary.total
        drawing = (params.temperature, params.top_k)
        told = self._ops.sample_candidates(logits, rows, *drawing, params.seeds, lengths, of.start, total)
        filters = (*drawing, params.top_p, params.min_p, params.seeds)
        tokens: torch.Tensor = self._ops.sample_merge(of.gather(told), rows, *filters, lengths, total)
        return tokens

    def with_logprobs(self, logits: torch.Tensor, drawn: Drawn, num_logprobs: int) -> Drawn:
        """The same draw with log-probabilities of its tokens and of the `num_logprobs` likeliest, logits [B, V]."""
        found = self._ops.logprobs(logits, drawn.tokens.clamp(min=0).long(), num_logprobs)
        return replace(drawn, logprobs=found)
