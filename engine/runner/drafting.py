"""Drafted tokens on the device: where entries truly begin, what is drawn behind each draft, and how many
are accepted.

How long a row is after a drafted step the device knows first (`RowTables.lengths`), so that the step behind it can be
launched before the host does. Noise is keyed by (seed, position): a token is drawn behind each draft as if nothing were
drafted, and a draft is accepted while it equals the token drawn in its place (Daliri, Musco and Suresh 2024,
arXiv:2408.07978).

All of it goes by what is staged on the device, in tensors whose sizes a step's shape says: a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.plan import StepPlan
from engine.runner.batch import SampledEntries
from engine.runner.inputs import Inputs, StepShape
from engine.runner.tables import RowTables
from engine.sampling.sampler import Drawn
from kernels.select import Ops


def put_proposals(inputs: Inputs, shape: StepShape, tables: RowTables, ops: Ops) -> None:
    """Put drafts that the plan names into the token table, behind the true ends of the staged step's entries."""
    first, entries, proposals = shape.num_single, inputs.entries(shape), inputs.proposals(shape)
    proposed = (proposals.start[first:], proposals.size[first:], proposals.count[first:])
    ops.put_drafts(proposals.tokens, *proposed, entries.lengths[first:], entries.rows[first:], tables.tokens)


@dataclass(frozen=True, slots=True)
class Verify:
    """What of a computed step with drafts is drawn and compared, of T tokens in B entries.

    draws      E of them: of each, table row, row that takes the token, tokens held before it
    places     [E] place of the token before it among the step's; None when there is a draw behind each
    ids        [T] int32 the step's tokens
    count      [B] int32 drafts of each entry
    last       [B] int32 place of each entry's last token
    entries    the step's entries
    """

    shape: StepShape
    draws: SampledEntries
    places: torch.Tensor | None
    ids: torch.Tensor
    count: torch.Tensor
    last: torch.Tensor
    entries: SampledEntries

    @classmethod
    def of(cls, inputs: Inputs, shape: StepShape, ids: torch.Tensor, places: torch.Tensor | None) -> Verify:
        draws = inputs.tokens(shape)
        if places is not None:
            draws = SampledEntries(
                *(part.index_select(0, places) for part in (draws.rows, draws.out_rows, draws.lengths))
            )
        entries = inputs.entries(shape)
        return cls(shape, draws, places, ids, inputs.proposals(shape).count, inputs.last_indices(shape), entries)

    def select_drawing(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [T, …] what draws, [E, …]."""
        return x if self.places is None else x.index_select(0, self.places)

    def put_back(self, tables: RowTables) -> None:
        """The step's tokens stand in the token table again, where draws behind them were put since."""
        tables.tokens[self.draws.rows, self.draws.lengths - 1] = self.ids

    def accept(self, drawn: Drawn, tables: RowTables, ops: Ops) -> torch.Tensor:
        """How many tokens each entry gave, of drawn [E], and the place of its last kept one, [2, B] int32; the rows are
        longer by as many from now on. A draw behind a draft that is no token (−1) is left to the next step."""
        tokens = drawn.tokens
        if self.places is not None:
            tokens = torch.full_like(self.ids, -1).index_copy(0, self.places, tokens)
        entries = (self.entries.lengths, self.entries.out_rows, tables.lengths)
        told: torch.Tensor = ops.accept_drafts(tokens, self.ids, self.last, self.count, *entries, self.shape.drafts)
        return told


def draw_places(plan: StepPlan) -> tuple[list[int], np.ndarray]:
    """Of a step that is not padded: each entry's first draw among all, and places of the tokens before the draws. An
    entry draws behind its last token of its own and behind each draft."""
    first, places, end, drawn = [], [], 0, 0
    for entry, count in enumerate(plan.count):
        end += count
        draws = 1 + plan.drafts[entry].count if entry in plan.drafts else 1
        first.append(drawn)
        places.append(np.arange(end - draws, end))
        drawn += draws
    return first, np.concatenate(places)


def first_draws(shape: StepShape, plan: StepPlan, at: Sequence[int]) -> list[int]:
    """Of a padded step with drafts, whose entries stand at the places `at`: each entry's first draw among the
    tokens."""
    singles = plan.count.count(1)
    stops = np.cumsum([shape.num_single, *plan.count[singles:]])
    return [*at[:singles], *stops[:-1].tolist()]
