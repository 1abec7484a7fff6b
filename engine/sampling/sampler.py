"""From logits to tokens: edits, penalties, the draw, and log-probabilities of the logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.sampling.logits import EntryEdits, edit, sent
from engine.sampling.params import RowParams
from kernels.select import Ops


@dataclass(frozen=True, slots=True)
class EntryMasks:
    """Which tokens some entries may draw: entries [n] int32, bits [n, W] int32 as `mask_logits` takes them."""

    entries: torch.Tensor
    bits: torch.Tensor

    @classmethod
    def sent(cls, entries: Sequence[int], bits: np.ndarray, device: torch.device) -> EntryMasks:
        return cls(sent(np.array(entries, np.int32), device), sent(bits, device))


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
    """Draws by Gumbel-max noise keyed by (seed, position): the same draw alone, in a batch, and when replayed."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def draw(
        self,
        logits: torch.Tensor,
        params: RowParams,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        token_table: torch.Tensor,
        extras: SamplingExtras,
    ) -> Drawn:
        """logits [B, V]; rows, lengths [B] int32: of each entry, its row of token_table [R, L] int32 and of params.

        As in vLLM, edits come before penalties, penalties before temperature, and logprobs see none of them. Masks come
        behind edits: what they forbid no bias allows.
        """
        final = logits
        if not extras.plain:
            final = logits.to(torch.float32, copy=True)
        if extras.edits:
            edit(final, extras.edits, lengths)
        if extras.masks is not None:
            self._ops.mask_logits(final, extras.masks.entries, extras.masks.bits)
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
            )
        tokens = self._ops.sample(
            final, rows, params.temperature, params.top_k, params.top_p, params.min_p, params.seeds, lengths
        )
        drawn = Drawn(tokens)
        return drawn if extras.num_logprobs is None else self.with_logprobs(logits, drawn, extras.num_logprobs)

    def with_logprobs(self, logits: torch.Tensor, drawn: Drawn, num_logprobs: int) -> Drawn:
        """The same draw with log-probabilities of its tokens and of the `num_logprobs` likeliest, logits [B, V]."""
        found = self._ops.logprobs(logits, drawn.tokens.clamp(min=0).long(), num_logprobs)
        return replace(drawn, logprobs=found)
