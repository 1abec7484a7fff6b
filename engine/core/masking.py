"""What constraints ask of a step: matchers take its tokens, and the masks of the next step's draws are made meanwhile.

The loop's thread only hands over: all matchers of a step at once, to threads of theirs.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

from engine.core import stopping
from engine.core.commit import InFlight
from engine.core.plan import MaskedPending, StepResult
from engine.core.request import Matcher, Matchers, Request, Status


@dataclass(frozen=True, slots=True)
class StartedMasks:
    """The masks of a launched step, on their way. of: whose, as the plan's masked entries stand."""

    step: InFlight
    of: list[tuple[Request, Matcher]]
    made: Future[None]

    def draw(self) -> list[tuple[Request, str]]:
        """Wait for the masks and let the step's masked entries draw: whose answers cannot go on, and why."""
        self.made.result()
        cast(MaskedPending, self.step.pending).draw()
        return [
            (request, matcher.error)
            for request, matcher in self.of
            if matcher.error is not None and request.status is not Status.FINISHED
        ]


def advance(matchers: Matchers, step: InFlight, result: StepResult) -> dict[int, int]:
    """Let matchers take a step's tokens, before `Committer.commit` gives them to their requests: of each masked entry
    with drafts whose request goes on, how many those will be."""
    drafts, requests, tokens = step.plan.drafts, step.requests, result.tokens
    entries = [i for i in step.plan.masked if requests[i].status is not Status.FINISHED and i not in result.errors]
    runs = [[tokens[i]] for i in entries]
    if drafts:
        for i, run in zip(entries, runs, strict=True):
            if i in drafts:
                run += result.accepted.get(i, ())
                del run[stopping.count_until_end(requests[i], run) :]
    taken = matchers.advance([cast(Matcher, requests[i].matcher) for i in entries], runs)
    return {i: count for i, count in zip(entries, taken, strict=True) if i in drafts} if drafts else {}


def start(matchers: Matchers, step: InFlight) -> StartedMasks:
    """Start to make the masks of a launched step, now that matchers have taken all tokens before its own."""
    plan = step.plan
    of = [(step.requests[entry], cast(Matcher, step.requests[entry].matcher)) for entry in plan.masked]
    drafts: list[list[int]] = []
    if plan.drafts:
        drafts = [
            plan.drafts[entry].behind(request.num_prompt + matcher.count) if entry in plan.drafts else []
            for entry, (request, matcher) in zip(plan.masked, of, strict=True)
        ]
    count = len(of) + sum(map(len, drafts))
    masks = cast(MaskedPending, step.pending).mask_rows(count, matchers.mask_words)
    return StartedMasks(step, of, matchers.start_masks([matcher for _, matcher in of], drafts, masks))
