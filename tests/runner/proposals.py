"""What heads propose, in front of which text, and requests that make them do it."""

from __future__ import annotations

from typing import Any

from engine.api import Engine
from engine.runner.draft_head import HeadDrafter
from engine.runner.draft_model import DraftModel
from engine.runner.inputs import StepShape
from engine.types import RequestInput, SamplingParams
from tests.runner.test_drafts import VOCAB, Heard


def run(engine: Engine, asked: list[RequestInput]) -> Heard:
    heard, inflight = Heard(), None
    for request in asked:
        engine.submit(request, heard)
    while engine.loop.live or inflight is not None:
        inflight = engine.loop.iterate(inflight)
    engine.check_integrity()
    return heard


def prompts(count: int, first: int = 0, **params: Any) -> list[RequestInput]:
    """Of many lengths, none of which begins as another does."""
    made = []
    for i in range(first, first + count):
        ids = [(11 + 37 * i + 5 * j * (1 + i % 3)) % VOCAB for j in range(5 + 23 * (i % 6))]
        asked = SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **params)
        made.append(RequestInput(request_id=str(i), prompt_ids=ids, params=asked))
    return made


class Proposals:
    """What a head, or a smaller model, proposed, with the text in front of it."""

    def __init__(self, drafter: HeadDrafter | DraftModel) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self._drafter, self._propose = drafter, drafter.propose
        drafter.propose = self  # type: ignore[assignment,method-assign]

    def __call__(self, shape: StepShape, *briefly: bool) -> None:
        self._propose(shape, *briefly)
        inputs, tables = self._drafter._inputs, self._drafter._tables
        entries, count = inputs.entries(shape), inputs.proposals(shape).count
        for row, length, drafts in zip(entries.rows.tolist(), entries.lengths.tolist(), count.tolist(), strict=True):
            if drafts and row != tables.dummy:
                held = tables.tokens[row, :length].tolist()
                self.seen.append((held[: length - drafts], held[length - drafts :]))
