"""Constrained requests in the loop: matchers go together, and their masks are made beside the loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Drafter, Matcher
from engine.types import Constraint, FinishReason, RequestInput, TokenEvent
from tests.core.drafting import Seer
from tests.core.harness import Harness, make_config
from tests.core.scripted_runner import ScriptedRunner, pool

HELD = Constraint(kind="regex", text="a+")
PROMPT = list(range(2, 12))


class CountingMatcher:
    """Any tokens may follow; its answer is complete behind `enough`, or cannot go on behind `most`."""

    looks_ahead = True

    def __init__(self, enough: int | None, most: int | None) -> None:
        self.count = 0
        self.error: str | None = None
        self._enough, self._most = enough, most

    @property
    def ended(self) -> bool:
        return self.count == self._enough

    def drafting(self, other: Drafter) -> Drafter:
        return other

    def take(self, run: Sequence[int]) -> int:
        assert not self.ended, "nothing follows what is complete"
        took = len(run) if self._enough is None else min(len(run), self._enough - self.count)
        self.count += took
        if self._most is not None and self.count >= self._most:
            self.error = "nothing may follow"
        return took


class Unmade(Future[None]):
    """Masks that are made when somebody says so. Who waits for them before would wait for ever."""

    def result(self, timeout: float | None = None) -> None:
        assert self.done()


class CountingGrammars:
    """calls: what the loop asked for, in order."""

    mask_words = 2

    def __init__(self, enough: int | None = None, most: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.drafts: list[list[int]] = []
        self.unmade: Unmade | None = None
        self._ends = (enough, most)

    def make(self, input: RequestInput, ready: Any) -> None:
        ready(CountingMatcher(*self._ends))

    def advance(self, matchers: Sequence[Matcher], runs: Sequence[Sequence[int]]) -> list[int]:
        self.calls.append(("advance", len(matchers)))
        return [matcher.take(run) for matcher, run in zip(matchers, runs, strict=True)]  # type: ignore[attr-defined]

    def start_masks(self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], masks: Any) -> Future[None]:
        assert masks.shape == (len(matchers) + sum(map(len, drafts)), self.mask_words)
        self.drafts += map(list, drafts)
        self.calls.append(("start", len(matchers)))
        self.unmade = Unmade()
        return self.unmade

    def close(self) -> None:
        pass


class MaskedStep:
    def __init__(self, step: Any, calls: list[tuple[str, int]]) -> None:
        self._step = step
        self._calls = calls
        self._drawn = False

    @property
    def done(self) -> bool:
        return self._drawn and self._step.done

    def mask_rows(self, count: int, words: int) -> Any:
        return np.empty((count, words), np.int32)

    def draw(self) -> None:
        self._drawn = True
        self._calls.append(("draw", len(self._step.plan.masked)))

    def wait(self) -> StepResult:
        assert self._drawn
        return self._step.wait()  # type: ignore[no-any-return]


class MaskedRunner(ScriptedRunner):
    calls: list[tuple[str, int]]

    def launch(self, plan: StepPlan) -> Any:
        step = super().launch(plan)
        return MaskedStep(step, self.calls) if plan.masked else step


class HeldHarness(Harness):
    """Masks are made once a step's tokens are delivered, or at once where there are none."""

    def __init__(self, grammars: CountingGrammars, draft_tokens: int = 0, **config: Any) -> None:
        runner = MaskedRunner(pool())
        runner.calls = self.calls = grammars.calls
        self._grammars = grammars
        drafter = (lambda: Seer(runner)) if draft_tokens else None
        super().__init__(runner, make_config(**config), drafter, draft_tokens, grammars)
        start = grammars.start_masks

        def started(*arguments: Any) -> Future[None]:
            made = start(*arguments)
            if not self.inflight or not config.get("overlap", True):
                made.set_result(None)
            return made

        grammars.start_masks = started  # type: ignore[method-assign]

    def deliver(self, events: list[TokenEvent]) -> None:
        super().deliver(events)
        self.calls.append(("deliver", len(events)))
        if self._grammars.unmade is not None and not self._grammars.unmade.done():
            self._grammars.unmade.set_result(None)


class Arrives(Seer):
    """Another thread does something while the loop takes in what is said of its request."""

    def __init__(self, runner: ScriptedRunner, arriving: list[Callable[[], None]]) -> None:
        super().__init__(runner)
        self._arriving = arriving

    def close(self, given: Sequence[int]) -> None:
        while self._arriving:
            self._arriving.pop()()


class ArrivingGrammars(CountingGrammars):
    """Matchers are there at once, as of a grammar that is kept."""

    def __init__(self, arriving: list[Callable[[], None]]) -> None:
        super().__init__(enough=3)
        self._arriving = arriving

    def make(self, input: RequestInput, ready: Any) -> None:
        matcher, arriving = CountingMatcher(3, None), self._arriving

        def drafting(other: Drafter) -> Drafter:
            while arriving:
                arriving.pop()()
            return other

        matcher.drafting = drafting  # type: ignore[method-assign]
        ready(matcher)


def test_a_request_that_comes_with_its_matcher_while_matchers_are_taken_in_waits_for_the_next_step() -> None:
    arriving: list[Callable[[], None]] = []
    harness = HeldHarness(ArrivingGrammars(arriving), draft_tokens=2)
    arriving.append(lambda: harness.submit("b", PROMPT[::-1], structured_outputs=HELD))
    harness.submit("a", PROMPT, structured_outputs=HELD)
    harness.run()
    assert [len(harness.tokens(name)) for name in "ab"] == [3, 3]


def test_a_request_that_comes_and_goes_while_cancelled_ones_are_taken_out_is_cancelled() -> None:
    runner = ScriptedRunner(pool())
    arriving: list[Callable[[], None]] = []
    harness = Harness(runner, drafter=lambda: Arrives(runner, arriving), draft_tokens=2)

    def come_and_go() -> None:
        harness.submit("b", PROMPT[::-1])
        harness.engine.abort("b")

    harness.submit("a", PROMPT, max_tokens=100)
    harness.step(2)
    arriving.append(come_and_go)
    harness.engine.abort("a")
    harness.run()
    assert [harness.reason(name) for name in "ab"] == [FinishReason.CANCELLED] * 2


def test_tokens_are_delivered_while_the_next_masks_are_made() -> None:
    engine = HeldHarness(CountingGrammars())
    prompts = {name: [ord(name) - 90] * 10 for name in "abc"}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, structured_outputs=HELD, max_tokens=6)
    engine.step(2)
    engine.calls.clear()
    engine.step(2)
    assert engine.calls == [("advance", 3), ("start", 3), ("deliver", 3), ("draw", 3)] * 2
    engine.run()
    assert all(engine.tokens(name) == engine.expected(prompt, 6) for name, prompt in prompts.items())


@pytest.mark.parametrize("overlap", [True, False])
def test_matchers_of_a_step_go_together_and_others_cost_nothing(overlap: bool) -> None:
    engine = HeldHarness(CountingGrammars(), overlap=overlap)
    engine.submit("free", PROMPT, max_tokens=20)
    engine.step(3)
    assert not [name for name, _ in engine.calls if name != "deliver"]
    for i in range(4):
        engine.submit(str(i), PROMPT, structured_outputs=HELD, max_tokens=6)
    engine.run()
    assert [count for name, count in engine.calls if name == "advance"] == [4] * 6
    assert engine.tokens("0") == engine.expected(PROMPT, 6)
    assert engine.tokens("free") == engine.expected(PROMPT, 20)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_an_answer_ends_with_the_token_that_completes_it(overlap: bool, draft_tokens: int) -> None:
    """However many stood behind it."""
    engine = HeldHarness(CountingGrammars(enough=6), draft_tokens, overlap=overlap)
    engine.submit("a", PROMPT, structured_outputs=HELD, max_tokens=20)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 6)
    assert engine.reason("a") is FinishReason.STOP


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_what_ends_a_request_by_itself_comes_before_what_completes_its_answer(overlap: bool, draft_tokens: int) -> None:
    engine = HeldHarness(CountingGrammars(enough=6), draft_tokens, overlap=overlap)
    engine.submit("a", PROMPT, structured_outputs=HELD, max_tokens=5)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 5)
    assert engine.reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_that_cannot_go_on_ends_alone(overlap: bool) -> None:
    engine = HeldHarness(CountingGrammars(most=3), overlap=overlap)
    engine.submit("free", PROMPT, max_tokens=20)
    engine.submit("a", PROMPT, structured_outputs=HELD, max_tokens=20)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 3)
    assert engine.end("a").error == "nothing may follow"
    assert engine.tokens("free") == engine.expected(PROMPT, 20)


def test_masks_are_made_behind_the_drafts_that_the_row_truly_has() -> None:
    """The plan counted on drafts that did not stand."""
    engine = HeldHarness(CountingGrammars(), 3)
    seers = [Seer(engine.runner, right=0.5, seed=1)]
    engine.engine._drafter = lambda: seers[0]
    engine.submit("a", PROMPT, structured_outputs=HELD, max_tokens=30)
    asked = engine.loop._matchers.start_masks  # type: ignore[union-attr]
    checked = []

    def start_masks(matchers: Sequence[Any], drafts: Sequence[Sequence[int]], masks: Any) -> Future[None]:
        held = len(PROMPT) + matchers[0].count
        if drafts and engine.inflight is not None:
            plan = engine.runner.plans[-1]
            assert list(drafts[0]) == plan.drafts[0].behind(held)
            checked.append(held)
        return asked(matchers, drafts, masks)  # type: ignore[no-any-return]

    engine.loop._matchers.start_masks = start_masks  # type: ignore[union-attr, method-assign]
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 30)
    assert checked


def test_a_cancelled_request_takes_no_further_tokens() -> None:
    engine = HeldHarness(CountingGrammars())
    for name in "ab":
        engine.submit(name, PROMPT, structured_outputs=HELD, max_tokens=9)
    engine.step(3)
    engine.engine.abort("a")
    engine.calls.clear()
    engine.step()
    assert ("advance", 1) in engine.calls
    engine.run()
    assert engine.reason("a") is FinishReason.CANCELLED
    assert engine.tokens("b") == engine.expected(PROMPT, 9)
