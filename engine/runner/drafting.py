"""Drafted tokens on the device: where lines truly begin, what is drawn behind each draft, and how many stand.

How long a row is after a drafted step the device knows first (`RowTables.lengths`), so that the step behind it can be
launched before the host does. Noise is keyed by (seed, position): a token is drawn behind each draft as if nothing were
drafted, and a draft stands while it equals the token drawn in its place (Daliri, Musco and Suresh 2024,
arXiv:2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import StepPlan
from engine.runner.inputs import Inputs, Lines, StepShape
from engine.runner.tables import RowTables
from engine.sampling.logits import sent

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a plan's lines draft, on the host: B lines, F drafts, 1 + k draws a line with k drafts.

    first  a line's first draw
    parts  what goes to the device: a line's drafts, and where its proposals start, lie and how many they are; a draft's
           line and its number within it; a draw's line and its number within it; all proposals
    """

    first: list[int]
    parts: tuple[Numbers, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> Drafts:
        lines = np.arange(len(plan.rows))
        count, start, offset, size = np.zeros((4, len(lines)), np.int64)
        tokens: list[int] = []
        for line, draft in plan.drafts.items():
            count[line], start[line] = draft.count, draft.start
            offset[line], size[line] = len(tokens), len(draft.tokens)
            tokens += draft.tokens
        of_draft, of_draw = np.repeat(lines, count), np.repeat(lines, count + 1)
        first = np.cumsum(count + 1) - count - 1
        within = np.arange(len(of_draft)) - np.repeat(np.cumsum(count) - count, count)
        draw = np.arange(len(of_draw)) - first[of_draw]
        parts = (count, start, offset, size, first, of_draft, within, of_draw, draw, np.array(tokens, np.int64))
        return cls(first.tolist(), parts)

    def put(self, inputs: Inputs, shape: StepShape, tables: RowTables) -> DraftedStep:
        """Behind the rows' true ends in the token table; lines of the staged step begin there from now on."""
        device = tables.tokens.device
        held = sent(np.concatenate(self.parts), device).split([len(part) for part in self.parts])
        count, start, offset, size, first, of_draft, within, of_draw, draw, proposed = held
        inputs.begin_at_true_ends(shape, count)
        lines, last = inputs.lines(shape), inputs.last(shape)
        length = lines.lengths - count
        at = length[of_draft] + within
        own = torch.minimum((at - start[of_draft]).clamp(min=0), size[of_draft] - 1)
        tokens = proposed[offset[of_draft] + own].int()
        tables.tokens[lines.rows[of_draft].long(), at] = tokens
        draws = Lines(lines.rows[of_draw], lines.out_rows[of_draw], (length[of_draw] + draw).int())
        places = (last - count)[of_draw] + draw
        return DraftedStep(draws, places, tokens, of_draft, within, first, length, lines.out_rows)


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """The same on the device.

    draws          E of them: table row, row that takes the token, tokens held before it
    places         [E] place of the token before it among the step's
    tokens         [F] int32 what is drafted; of_draft, within [F]: its line, its number there
    first, length  [B] a line's first draw; tokens that its row truly holds
    out_rows       [B] int32 rows that take the lines' tokens
    """

    draws: Lines
    places: torch.Tensor
    tokens: torch.Tensor
    of_draft: torch.Tensor
    within: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    out_rows: torch.Tensor

    def accept(self, drawn: torch.Tensor, tables: RowTables) -> torch.Tensor:
        """How many tokens each line gave, [B] int32, of drawn [E] int32; the rows are longer by as many. A draw behind
        a draft that is no token (−1) is left to the next step."""
        equal = torch.zeros(len(self.first), len(self.tokens), dtype=torch.int32, device=drawn.device)
        equal[self.of_draft, self.within] = (drawn[self.first[self.of_draft] + self.within] == self.tokens).int()
        stood = equal.cumprod(1).sum(1)
        lost = (drawn[self.first + stood] < 0) & (stood > 0)
        given = (stood + 1 - lost.int()).int()
        tables.lengths[self.out_rows.long()] = (self.length + given).int()
        return given
