"""How deep to draft follows what drafts came to and what steps took."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import SpeculationConfig
from engine.core.draft_depth import (
    FIRST_REST,
    MAX_PLAIN_TRIES,
    STEPS_BEFORE_PLAIN,
    STEPS_BEFORE_TRIAL,
    STRETCH,
    Acceptance,
    DraftDepth,
    Stretch,
)
from engine.core.plan import Draft, Pending, StepPlan
from tests.core.drafting import Seer
from tests.core.harness import Harness, make_config
from tests.core.scripted_runner import ScriptedRunner, pool

PROMPT = list(range(2, 12))


class Costly(ScriptedRunner):
    """Its steps take `step_s` and, for each draft, `draft_s` more."""

    def __init__(self, draft_s: float) -> None:
        super().__init__(pool(2000), step_s=0.01)
        self._draft_s = draft_s

    def launch(self, plan: StepPlan) -> Pending:
        plain = self.step_s
        self.step_s += self._draft_s * sum(draft.count for draft in plan.drafts.values())
        step = super().launch(plan)
        self.step_s = plain
        return step


def played(right: float, draft_s: float, tokens: int = 400, rows: int = 1, overlap: bool = True) -> tuple[int, float]:
    """Drafts and seconds of requests of so many tokens each."""
    runner = Costly(draft_s)
    config = msgspec.structs.replace(
        make_config(overlap=overlap, delay_launch=False), speculation=SpeculationConfig(method="ngram", tokens="auto")
    )
    engine = Harness(runner, config, lambda: Seer(runner, right=right, seed=3), 8)
    for i in range(rows):
        engine.submit(str(i), [*PROMPT, i], max_tokens=tokens)
    engine.run()
    for i in range(rows):
        assert engine.tokens(str(i)) == engine.expected([*PROMPT, i], tokens)
    return engine.engine.stats().draft_tokens, runner.now


@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_drafter_that_is_always_wrong_is_asked_for_next_to_nothing(rows: int) -> None:
    drafts, seconds = played(right=0.0, draft_s=0.0005 / rows, rows=rows)
    assert drafts / rows < 60, "of 3,200 that a fixed depth would take"
    assert 400 * 0.01 / seconds >= 0.93, "next to no drafts"
    later, _ = played(right=0.0, draft_s=0.0005 / rows, rows=rows, tokens=800)
    assert (later - drafts) / rows < 400 / STEPS_BEFORE_TRIAL + 2


def test_a_drafter_that_is_always_right_goes_as_deep_as_it_may() -> None:
    _, seconds = played(right=1.0, draft_s=0.0002)
    assert seconds < 400 * 0.01 / 4


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft_s", [0.0001, 0.002, 0.02])
def test_drafts_never_cost_much_and_pay_where_they_can(right: float, draft_s: float) -> None:
    _, seconds = played(right, draft_s, overlap=False)
    _, plain = played(right, 1.0, overlap=False)
    best = max(_rate(right, draft_s, depth) for depth in range(9))
    assert seconds < 400 / best * 1.25 + 0.3
    assert seconds < 4.3
    assert plain >= 4.0


def _rate(right: float, draft_s: float, depth: int) -> float:
    """Tokens a second at a fixed depth."""
    return sum(right**j for j in range(depth + 1)) / (0.01 + depth * draft_s)


def plan(rows: int, drafts: int) -> StepPlan:
    drafted = {row: Draft(drafts, 5, [1] * drafts) for row in range(rows)} if drafts else {}
    return StepPlan(1, [*range(rows)], [4] * rows, [1 + drafts] * rows, [True] * rows, drafts=drafted)


def test_what_a_draft_costs_decides_who_drafts() -> None:
    """Of two requests the one whose drafts stand more often drafts deeper; where a draft costs much, nobody does."""
    depths = []
    for extra in (0.0000001, 0.001, 0.005, 0.5):
        depth, good, bad = DraftDepth(7), Acceptance(), Acceptance()
        for _ in range(30):
            good.drafted(4, 4)
            bad.drafted(4, 1)
        depth.observe_step(plan(2, 0), 0.01)
        depth.observe_step(plan(2, 4), 0.01 + 8 * extra)
        depths.append(depth.draft_counts(2, [good, bad]))
    assert depths[0] == [7, 7]
    assert depths[1][0] == 7
    assert depths[1][1] < 7
    assert depths[3] == [0, 0]
    assert sorted(depths, reverse=True) == depths


def test_who_drafts_goes_as_deep_as_the_padded_step() -> None:
    """Drafts within it are free. The more they cost, the fewer of them, and the fewer who draft."""
    found = []
    for extra in (0.0001, 0.002, 0.0045, 0.02):
        depth, requests = DraftDepth(7), [Acceptance() for _ in range(3)]
        for of, accepted in zip(requests, (0, 3, 6), strict=True):
            for _ in range(10):
                of.drafted(7, accepted)
        depth.observe_step(plan(3, 0), 0.01)
        depth.observe_step(plan(3, 4), 0.01 + 4 * extra)
        found.append(depth.draft_counts(3, requests))
    assert found == [[0, 7, 7], [0, 5, 5], [0, 3, 3], [0, 0, 0]]


def test_a_deeper_step_is_measured_for_itself() -> None:
    """Seven drafts cost more than twice what three do, as where their tokens no longer fit a tile."""
    depth, requests = DraftDepth(7), [Acceptance() for _ in range(4)]
    for of in requests:
        for _ in range(30):
            of.drafted(7, 7)
    depth.observe_step(plan(4, 0), 0.01)
    depth.observe_step(plan(4, 3), 0.012)
    assert depth.draft_counts(4, requests) == [7] * 4, "as much for each draft, as far as is known"
    depth.observe_step(plan(4, 7), 0.04)
    depth.observe_step(plan(4, 5), 0.04)
    assert depth.draft_counts(4, requests) == [3] * 4
    depth.observe_step(plan(4, 2), 0.012)
    assert depth.draft_counts(4, requests) == [3] * 4, "two drafts are padded to three"


def test_other_numbers_of_entries_go_by_the_nearest() -> None:
    """Each would lose steps without drafts to be measured, of which a load of a few hundred steps has not many."""
    depth = DraftDepth(4)
    depth.observe_step(plan(8, 0), 0.01)
    for entries in range(1, 9):
        assert all(depth.draft_counts(entries, [Acceptance() for _ in range(entries)])), entries


def test_plain_steps_are_measured_before_drafts_and_now_and_then() -> None:
    depth, of = DraftDepth(4), [Acceptance()]
    found = [depth.draft_counts(1, of) for _ in range(2 * STEPS_BEFORE_PLAIN)]
    assert found[:MAX_PLAIN_TRIES] == [[0]] * MAX_PLAIN_TRIES, "no time came, so it goes by a guess from there on"
    assert found.count([0]) == MAX_PLAIN_TRIES + 2


def test_a_new_request_begins_with_what_others_came_to() -> None:
    overall = Acceptance(past_weight=0.995)
    for _ in range(200):
        Acceptance(overall).drafted(4, 0)
    assert Acceptance(overall).acceptance_rate < 0.05
    assert Acceptance().acceptance_rate == pytest.approx(0.6)


def test_a_slow_first_step_and_a_halt_are_no_measure() -> None:
    """A step that made its graph, and one in which a kernel was compiled."""
    depth, of = DraftDepth(4), [Acceptance()]
    for seconds in (0.2, 0.01, 0.01, 0.5, 0.01):
        depth.observe_step(plan(1, 0), seconds)
    for seconds in (0.3, 0.011, 0.4, 0.011):
        depth.observe_step(plan(1, 4), seconds)
    assert depth.draft_counts(1, of) == [4]


def test_steps_that_are_not_ready_are_left_alone() -> None:
    """Of four requests two are right always: the same depth for all where that is ready and pays, else none."""
    held: set[tuple[int, int, int]] = {(0, 4, 7)}
    depth = DraftDepth(7, lambda *step: step in held)
    requests = [Acceptance() for _ in range(4)]
    for of in requests:
        for _ in range(30):
            of.drafted(7, 7 if of in requests[:2] else 0)
    depth.observe_step(plan(4, 0), 0.01)
    depth.observe_step(plan(4, 4), 0.01 + 16 * 0.0001)
    assert depth.draft_counts(4, requests) == [7] * 4
    held.clear()
    assert depth.draft_counts(4, requests) == [0] * 4
    held.add((2, 2, 7))
    assert depth.draft_counts(4, requests) == [7, 7, 0, 0]
    held.clear()
    held.add((0, 4, 7))
    depth.observe_step(plan(4, 4), 0.01 + 16 * 0.002)
    for _ in range(60):
        depth.observe_step(plan(4, 4), 0.01 + 16 * 0.002)
    assert depth.draft_counts(4, requests) == [0] * 4, "it would cost more than it gives"


def rest(depth: DraftDepth, entries: int, drafts: int, accepted: int) -> int:
    """Steps of a rest behind a stretch whose steps all have `drafts` drafts an entry, of which so many stood in all.
    A drafted step takes 1.2 times as long as a plain one."""
    of = Acceptance(depth.overall)
    for i in range(STRETCH):
        assert depth.follows(entries)
        of.drafted(max(drafts, 1) * entries, accepted // STRETCH + (i < accepted % STRETCH))
        depth.observe_step(plan(entries, drafts), 0.012 if drafts else 0.01)
    steps = 0
    while not depth.follows(entries):
        assert depth.draft_counts(entries, [of] * entries) == [0] * entries
        steps += 1
    return steps


def test_what_drafts_on_the_device_rests_when_drafts_do_not_pay() -> None:
    depth = DraftDepth(4, rests=True)
    depth.observe_step(plan(8, 0), 0.01)
    assert rest(depth, 8, 4, STRETCH * 8) == 0, "as many again as without, for a fifth more time"
    depth = DraftDepth(4, rests=True)
    depth.observe_step(plan(8, 0), 0.01)
    depth._stretch = Stretch()
    assert rest(depth, 8, 4, STRETCH) == FIRST_REST - 1, "less than the drafts took"
    assert rest(depth, 8, 0, 0) == 2 * FIRST_REST - 1, "nobody drafted"
    assert rest(depth, 8, 4, STRETCH * 8) == 0
    assert rest(depth, 8, 0, 0) == FIRST_REST - 1, "from the beginning again"


def test_far_fewer_entries_end_a_rest() -> None:
    depth = DraftDepth(4, rests=True)
    for _ in range(STRETCH):
        depth.observe_step(plan(8, 0), 0.01)
    assert not depth.follows(8)
    assert not depth.follows(5)
    assert depth.follows(4), "drafts may pay now"


def test_plans_say_whether_what_drafts_on_the_device_computes_them() -> None:
    runner = Costly(0.02)
    config = msgspec.structs.replace(
        make_config(overlap=False, delay_launch=False), speculation=SpeculationConfig(method="ngram", tokens="auto")
    )
    engine = Harness(runner, config, lambda: Seer(runner, right=0.0, seed=3), 8)
    depth = engine.engine.scheduler._depth
    assert depth is not None
    depth._rests = True
    engine.submit("a", PROMPT, max_tokens=200)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 200)
    followed = [plan.follows for plan in runner.plans]
    assert followed[0]
    assert not followed[-1]
