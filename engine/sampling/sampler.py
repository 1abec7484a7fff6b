"""From logits to tokens: edits, penalties, the draw, and log-probabilities of the logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.sampling.logits import LineEdits, edit, sent
from engine.sampling.params import RowParams
from kernels import Ops


@dataclass(frozen=True, slots=True)
class LineMasks:
    """Which tokens some lines may draw: lines [n] int32, bits [n, W] int32 as `mask_logits` takes them."""

    lines: torch.Tensor
    bits: torch.Tensor

    @classmethod
    def sent(cls, lines: Sequence[int], bits: np.ndarray, device: torch.device) -> LineMasks:
        return cls(sent(np.array(lines, np.int32), device), sent(bits, device))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a step's lines ask for beyond a draw. `plain` ones leave the draw to the device alone.

    num_logprobs: the most that a line asked for, or None. masks: what some lines may draw alone.
    """

    edits: Sequence[LineEdits] = ()
    penalties: bool = False
    num_logprobs: int | None = None
    masks: LineMasks | None = None

    @property
    def plain(self) -> bool:
        return not self.edits and not self.penalties and self.masks is None


PLAIN = Wishes()


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens [B] integers, −1 where a line's logits are not finite or nothing is allowed.

    ids, logprobs, ranks [B, k + 1] as the `logprobs` op gives them, or None. given: of a step with drafts, how many
    tokens each of its lines gave.
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
        wishes: Wishes,
    ) -> Drawn:
        """logits [B, V]; rows, lengths [B] int32: of each line, its row of token_table [R, L] int32 and of params.

        As in vLLM, edits come before penalties, penalties before temperature, and logprobs see none of them. Masks come
        behind edits: what they forbid no bias allows.
        """
        final = logits
        if not wishes.plain:
            final = logits.to(torch.float32, copy=True)
        if wishes.edits:
            edit(final, wishes.edits, lengths)
        if wishes.masks is not None:
            self._ops.mask_logits(final, wishes.masks.lines, wishes.masks.bits)
        if wishes.penalties:
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
        return drawn if wishes.num_logprobs is None else self.explain(logits, drawn, wishes.num_logprobs)

    def explain(self, logits: torch.Tensor, drawn: Drawn, num_logprobs: int) -> Drawn:
        """The same draw with log-probabilities of its tokens and of the `num_logprobs` likeliest, logits [B, V]."""
        found = self._ops.logprobs(logits, drawn.tokens.clamp(min=0).long(), num_logprobs)
        return replace(drawn, logprobs=found)
