"""Matchers that go together say what each says alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.structured import threads
from engine.structured.grammars import Grammars
from engine.structured.matcher import ALLOWED_S, ALLOWED_TOKEN_S, GrammarMatcher
from engine.structured.threads import MatcherThreads
from engine.structured.vocabulary import Vocabulary
from engine.types import Constraint
from tests.structured.schemas import SCHEMAS

SIZE, EOS = 640, frozenset((0, 2))
FREE = Constraint(kind="free", think="open", think_tokens=3)
FIXED = [
    Constraint(kind="regex", text="[a-c ]{2,9}"),
    Constraint(kind="regex", text="(a|b)*"),
    Constraint(kind="choice", text='["yes", "no", "日本"]'),
    Constraint(kind="choice", text='["yes"]', think="open"),
    Constraint(kind="choice", text='["yes"]', think="may", think_tokens=2),
    FREE,
]
CONSTRAINTS = st.one_of(
    st.sampled_from(FIXED), SCHEMAS.map(lambda schema: Constraint(kind="json", text=json.dumps(schema), whitespace=""))
)


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> Iterator[Vocabulary]:
    made = Vocabulary(str(checkpoint), SIZE, tuple(EOS))
    yield made
    made.close()


@pytest.fixture(scope="module")
def several() -> Iterator[MatcherThreads]:
    """On a machine of few cores too."""
    made = MatcherThreads(SIZE, EOS, num_threads=3)
    yield made
    made.close()


def filled(of: MatcherThreads, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]]) -> Any:
    masks = np.full((len(matchers) + sum(map(len, drafts)), of.words), 7, np.int32)
    of.start(matchers, drafts, masks).result(timeout=60)
    return masks


def allowed(mask: Any) -> list[int]:
    return [v for v in range(SIZE) if int(mask[v // 32]) >> v % 32 & 1]


class Answers:
    """The same answers twice: as they go together, and one by one."""

    def __init__(self, vocabulary: Vocabulary, constraints: Sequence[Constraint], free_until: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        first = [vocabulary.compiled(of) for of in constraints]
        pairs = list(zip(first, free_until, strict=True))
        self.together, self.alone = ([vocabulary.begun(of, least, ()) for of, least in pairs] for _ in range(2))

    def masks(self, of: MatcherThreads, drafts: Sequence[Sequence[int]]) -> Any:
        """Of those together. Those alone have the same."""
        masks = filled(of, self.together, drafts)
        singly = [
            self._vocabulary.masks([matcher], [tokens])
            for matcher, tokens in zip(self.alone, drafts or [()] * len(self.alone), strict=True)
        ]
        assert np.array_equal(masks, np.concatenate(singly))
        return masks

    def advance(self, of: MatcherThreads, runs: Sequence[Sequence[int]]) -> None:
        taken = of.advance(self.together, runs)
        for matcher, run, count in zip(self.alone, runs, taken, strict=True):
            for token in run[:count]:
                assert not matcher.ended
                matcher.advance(token)
            assert matcher.ended or count == len(run)
        self.check()

    def check(self) -> None:
        for matcher, other in zip(self.together, self.alone, strict=True):
            assert (matcher.ended, matcher.error, matcher.count) == (other.ended, other.error, other.count)
            assert (matcher.held, matcher.budget is None) == (other.held, other.budget is None)


@given(
    constraints=st.lists(CONSTRAINTS, min_size=1, max_size=6),
    timed=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_together_they_say_what_each_says_alone(
    vocabulary: Vocabulary, several: MatcherThreads, constraints: list[Constraint], timed: bool, data: Any
) -> None:
    """Masks, also behind drafts, errors and ends, whatever tokens come."""
    chance = data.draw(st.randoms(use_true_random=False))
    answers = Answers(vocabulary, constraints, [chance.choice((0, 4, 99)) for _ in constraints])
    for _ in range(8):
        drafts = [[chance.randrange(SIZE) for _ in range(chance.randrange(3))] for _ in constraints]
        several._timed = timed
        drafts = chance.choice((drafts, []))
        masks = answers.masks(several, drafts)
        runs: list[list[int]] = []
        for i, matcher in enumerate(answers.together):
            if matcher.ended:
                runs.append([])
                continue
            good = allowed(masks[i + sum(map(len, drafts[:i]))])
            token = chance.choice(good) if good and chance.random() < 0.9 else chance.randrange(SIZE)
            runs.append([token, *(chance.randrange(SIZE) for _ in range(chance.choice((0, 0, 2))))])
        several._timed = timed
        answers.advance(several, runs)


@pytest.mark.parametrize("least", [0, 2, 9])
def test_the_end_of_an_answer_waits_for_its_least_tokens_where_others_may_follow(
    vocabulary: Vocabulary, several: MatcherThreads, least: int
) -> None:
    """(a|b)* may always go on, and each choice is over with its last letter."""
    constraints = [Constraint(kind="regex", text="(a|b)*"), Constraint(kind="regex", text="aab?")]
    matchers = [vocabulary.begun(vocabulary.compiled(of), least, ()) for of in constraints]
    (a,) = vocabulary._tokens.greedy_tokenize("a")
    for count in range(3):
        masks = filled(several, matchers, ())
        for matcher, mask in zip(matchers, masks, strict=True):
            assert matcher.inner is not None
            said = np.frombuffer(matcher.inner.compute_bitmask(), np.uint8)
            may = set(np.flatnonzero(np.unpackbits(said, bitorder="little")).tolist())
            assert set(allowed(mask)) == (may - EOS if count < least and may - EOS else may)
        several.advance(matchers, [[a]] * 2 if count < 2 else [[a], []])


def test_llguidance_has_all_matchers_of_a_step_in_one_call(
    vocabulary: Vocabulary, several: MatcherThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call each would cost the engine's thread its time, and the interpreter's lock as often."""
    calls = []
    consume, fill = threads.consume_token_par, threads.fill_next_token_bitmask_par

    def consumed(executor: Any, given: Any) -> list[bool]:
        calls.append(("consume", len(given)))
        return consume(executor, given)

    def fill_all(executor: Any, given: Any, masks: Any) -> None:
        calls.append(("fill", len(given)))
        fill(executor, given, masks)

    monkeypatch.setattr(threads, "consume_token_par", consumed)
    monkeypatch.setattr(threads, "fill_next_token_bitmask_par", fill_all)
    several._timed, several._untimed = False, 9
    first = vocabulary.compiled(FIXED[0])
    matchers = [vocabulary.begun(first, 0, ()) for _ in range(20)]
    token = allowed(filled(several, matchers, ())[0])[0]
    assert several.advance(matchers, [[token]] * 20) == [1] * 20
    assert calls == [("fill", 20), ("consume", 20)]


def test_masks_are_being_made_when_their_start_returns(
    vocabulary: Vocabulary, several: MatcherThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the thread that started them goes on meanwhile."""
    went_on = threading.Event()
    fill = threads.fill_next_token_bitmask_par

    def fill_late(executor: Any, given: Any, masks: Any) -> None:
        assert went_on.wait(60)
        fill(executor, given, masks)

    monkeypatch.setattr(threads, "fill_next_token_bitmask_par", fill_late)
    several._timed, several._untimed = False, 9
    matchers = [vocabulary.begun(vocabulary.compiled(of), 0, ()) for of in FIXED[:3]]
    masks = np.empty((3, several.words), np.int32)
    made = several.start(matchers, (), masks)
    assert made.running()
    went_on.set()
    made.result(timeout=60)
    assert allowed(masks[2])


def test_a_step_that_took_long_is_followed_by_one_that_tells_whose_it_was(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one grammar's answers end, and others have their allowance."""
    hostile = vocabulary.compiled(Constraint(kind="grammar", text="start: s\ns: s s | /[a-z ]/\n"))
    healthy, other = vocabulary.compiled(FIXED[1]), vocabulary.compiled(FIXED[1])
    matchers = [vocabulary.begun(of, 0, ()) for of in (healthy, hostile, hostile, other)]
    hostile.allowance.left = 0.2
    made = MatcherThreads(SIZE, EOS, num_threads=2)
    (a,) = vocabulary._tokens.greedy_tokenize("a")
    for _ in range(400):
        filled(made, matchers, ())
        made.advance(matchers, [[a]] * 4)
        if all(matcher.error for matcher in matchers[1:3]):
            break
    made.close()
    assert all("takes too long" in (matcher.error or "") for matcher in matchers[1:3])
    assert matchers[0].error is matchers[3].error is None
    assert min(healthy.allowance.left, other.allowance.left) > 0.9 * ALLOWED_S


def test_a_quick_step_gives_each_grammar_back_what_it_left(vocabulary: Vocabulary, several: MatcherThreads) -> None:
    several._timed, several._untimed = False, 9
    first = vocabulary.compiled(FIXED[1])
    matchers = [vocabulary.begun(first, 0, ()) for _ in range(4)]
    first.allowance.left = 0.5
    (a,) = vocabulary._tokens.greedy_tokenize("a")
    several.advance(matchers, [[a]] * 4)
    assert 0.5 <= first.allowance.left <= 0.5 + 4 * ALLOWED_TOKEN_S


def test_closed_grammars_leave_no_threads(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    made = Grammars(str(checkpoint), SIZE, tuple(EOS))
    matchers: Any = [made._vocabulary.compiled(of) for of in FIXED[:3]]
    masks = np.empty((3, made.mask_words), np.int32)
    made.start_masks(matchers, (), masks).result(timeout=60)
    assert any(thread.name.startswith("nereid-masks") for thread in set(threading.enumerate()) - before)
    made.close()
    assert set(threading.enumerate()) <= before
