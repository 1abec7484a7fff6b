"""Entries that may give several tokens: what is drafted changes how fast a request goes, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.spec import PoolSpec
from engine.config import EngineConfig
from engine.types import FinishReason
from tests.core.drafting import NEVER, Dumb, Seer
from tests.core.harness import Harness, make_config, make_request
from tests.core.scripted_runner import ScriptedRunner, pool
from tests.core.test_any_load import Abort, Steps, configs, pools, prompts

PROMPT = list(range(2, 12))


def harness(
    spec: PoolSpec | None = None, count: int = 3, right: float = 1.0, few: bool = False, **config: object
) -> Harness:
    """With a drafter of `count` tokens that is right that often."""
    runner = ScriptedRunner(spec or pool())
    return Harness(runner, make_config(**config), lambda: Seer(runner, right=right, few=few), count)


# How fast


def test_drafts_that_stand_come_at_once() -> None:
    engine = harness(overlap=False)
    engine.submit("a", PROMPT, max_tokens=9)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 9)
    assert engine.engine.stats().accepted_at[:4] == (2, 2, 2, 0)
    assert [event.token_ids for event in engine.events["a"]] == [
        engine.expected(PROMPT, 9)[i:j] for i, j in ((0, 1), (1, 5), (5, 9))
    ]


def test_a_request_that_asks_hears_what_it_has_used() -> None:
    engine = harness(overlap=False)
    for name in ("before", "a"):
        asked = msgspec.structs.replace(make_request(name, PROMPT, max_tokens=9), want_usage=name == "a")
        engine.engine.submit(asked, engine)
        engine.run()
    assert {event.usage for event in engine.events["before"]} == {None}
    size = engine.runner.info.pool.block_size
    found = [event.usage for event in engine.events["a"]]
    assert [usage.blocks for usage in found if usage] == [-(-tokens // size) for tokens in (10, 14, 18)]
    assert [(usage.draft_tokens, usage.accepted_tokens) for usage in found if usage] == [(0, 0), (3, 3), (6, 6)]
    assert {usage.cached_blocks for usage in found if usage} == {(len(PROMPT) - 1) // size}


def test_a_plan_counts_on_every_draft_until_it_is_known_how_many_are_accepted() -> None:
    engine = harness(right=0.0)
    engine.submit("a", PROMPT, max_tokens=20)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 20)
    first, second = engine.runner.plans[1:3]
    assert (first.first, first.count, first.drafts[0].start) == ([10], [4], 11)
    # Three drafts are in the step under way: the next one begins behind them, or up to three tokens earlier.
    assert (second.first, second.count) == ([14], [4])
    assert (second.drafts[0].start, len(second.drafts[0].tokens)) == (12, 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_is_always_right_takes_fewer_steps(overlap: bool) -> None:
    engine = harness(overlap=overlap)
    engine.submit("a", PROMPT, max_tokens=41)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 41)
    assert len(engine.runner.plans) == 11


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"state_slots": 4}])
def test_without_a_proposal_plans_are_what_they_are_without_a_drafter(overlap: bool, kind: dict[str, int]) -> None:
    made = []
    for drafter in (None, Dumb):
        engine = Harness(ScriptedRunner(pool(20, **kind)), make_config(overlap=overlap), drafter, 3 if drafter else 0)
        for i in range(6):
            engine.submit(str(i), PROMPT[i:] + [i] * 9, max_tokens=30, seed=0)
            engine.step(2)
        engine.run()
        made.append(engine.runner.plans)
    assert made[0] == made[1]


# Where it ends


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("most", range(1, 10))
def test_no_token_is_given_past_the_limit(overlap: bool, most: int) -> None:
    engine = harness(overlap=overlap, count=4)
    engine.submit("a", PROMPT, max_tokens=most)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, most)
    assert engine.reason("a") is FinishReason.LENGTH
    for plan in engine.runner.plans:
        assert all(first + count < len(PROMPT) + most for first, count in zip(plan.first, plan.count, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_ends_a_request_in_the_middle_of_accepted_drafts(overlap: bool) -> None:
    engine = harness(overlap=overlap, count=5)
    wanted = engine.expected(PROMPT, 20)
    stop = wanted[3]
    assert stop not in wanted[:3]
    engine.submit("a", PROMPT, max_tokens=20, stop_token_ids=(stop,))
    engine.run()
    assert engine.tokens("a") == wanted[:4]
    assert (engine.reason("a"), engine.end("a").stop_reason) == (FinishReason.STOP, stop)
    assert engine.engine.stats().generated_tokens == 4


def test_an_entry_that_fails_behind_a_draft_gives_what_was_accepted_before() -> None:
    runner = ScriptedRunner(pool(), fail_row=lambda tokens: "broken" if len(tokens) == 13 else None)
    engine = Harness(runner, make_config(), lambda: Seer(runner), 5)
    engine.submit("a", PROMPT, max_tokens=20)
    engine.run()
    assert engine.tokens("a") == engine.expected(PROMPT, 3)
    assert (engine.reason("a"), engine.end("a").error) == (FinishReason.ERROR, "broken")


def test_each_token_given_has_its_logprobs() -> None:
    engine = harness(overlap=False)
    engine.submit("a", PROMPT, max_tokens=9, logprobs=0)
    engine.run()
    for event in engine.events["a"]:
        assert [entry.ids[0] for entry in event.logprobs or ()] == event.token_ids
    assert engine.end("a").cumulative_logprob == -0.5 * 9


# Memory


def test_no_one_gives_way_for_drafts() -> None:
    """Two requests that fill the pool together to the last block: drafts would need more."""
    engine = harness(pool(8, 4), count=6, overlap=False, prefix_cache=False)
    for name in "ab":
        engine.submit(name, [*PROMPT[:4], ord(name) - 90], max_tokens=7)
    engine.run()
    assert engine.engine.stats().preemptions == 0
    for name in "ab":
        prompt = [*PROMPT[:4], ord(name) - 90]
        assert engine.tokens(name) == engine.expected(prompt, 7)


def test_blocks_of_drafts_that_did_not_stand_are_taken_back_before_a_request_gives_way() -> None:
    engine = harness(pool(12, 2), count=6, right=0.0, overlap=False, prefix_cache=False)
    for name in "ab":
        engine.submit(name, [5, ord(name) - 90], max_tokens=9)
    engine.run()
    # Each ends with 10 tokens computed in 5 blocks of the 11; with its drafts a request would hold all there are.
    assert engine.engine.stats().preemptions == 0
    for name in "ab":
        assert engine.tokens(name) == engine.expected([5, ord(name) - 90], 9)


def test_drafts_stay_within_the_budget() -> None:
    engine = harness(count=8, max_rows=4, token_budget=9)
    for name in "abcd":
        engine.submit(name, [*PROMPT, ord(name) - 90], max_tokens=30)
    engine.run()
    assert max(plan.num_tokens for plan in engine.runner.plans) == 9


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_checkpoints_of_state_are_kept_where_they_are_due(overlap: bool, right: float) -> None:
    """A request that goes on where another ended finds the state of its last interval."""
    engine = harness(pool(128, state_slots=8), count=5, right=right, overlap=overlap, checkpoint_interval=16)
    engine.submit("a", PROMPT, max_tokens=60)
    engine.run()
    prompt = PROMPT + engine.tokens("a")
    engine.submit("b", [*prompt, 3], max_tokens=4)
    engine.run()
    assert engine.end("b").finish_reason is FinishReason.LENGTH
    assert engine.events["b"][0].num_cached == 64
    assert engine.tokens("b") == engine.expected([*prompt, 3], 4)


# Anything


@dataclass(frozen=True)
class Submit:
    prompt: list[int]
    max_tokens: int
    priority: int
    stop: tuple[int, ...]
    drafts_right: float
    few: bool
    logprobs: bool


submits = st.builds(
    Submit,
    prompts(),
    st.sampled_from([1, 2, 5, 9, 17, 26]),
    st.integers(-1, 1),
    st.sampled_from([(), (), (5, 6, 7)]),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.booleans(),
    st.booleans(),
)
actions = st.lists(
    st.one_of(submits, submits, submits, st.builds(Abort, st.integers(0, 11)), st.builds(Steps, st.integers(1, 6))),
    min_size=6,
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(spec=pools, config=configs(), most=st.integers(1, 6), actions=actions)
def test_any_drafts_under_any_load(
    spec: PoolSpec, config: EngineConfig, most: int, actions: list[Submit | Abort | Steps]
) -> None:
    """Random numbers of drafts, of which random ones stand, over preemption, cancellation, stop tokens and limits:
    tokens are the model's, and the prefix tree holds nothing else."""
    runner = ScriptedRunner(spec, step_s=0.01)
    drafters: list[Seer] = []
    engine = Harness(runner, config, lambda: drafters[-1], most)
    sent: dict[str, Submit] = {}
    aborted: set[str] = set()

    def check() -> None:
        texts = [request.prompt + engine.tokens(name) for name, request in sent.items()]
        for node in engine.engine._kv._tree.nodes():
            path: list[int] = []
            above = node
            while above.parent is not None:
                path = [*memoryview(above.tokens).cast("i"), *path]
                above = above.parent
            assert any(text[: len(path)] == path for text in texts), "the tree holds tokens that no request has"

    def step(count: int) -> None:
        for _ in range(count):
            if engine.loop.live or engine.inflight:
                engine.step()
                check()

    for action in actions:
        match action:
            case Steps(count):
                step(count)
            case Abort(index):
                engine.engine.abort(str(index))
                aborted.add(str(index))
            case Submit():
                name = str(len(sent))
                aborted.discard(name)
                sent[name] = action
                drafters.append(Seer(runner, right=action.drafts_right, few=action.few, seed=len(sent)))
                engine.submit(
                    name,
                    action.prompt,
                    max_tokens=action.max_tokens,
                    priority=action.priority,
                    stop_token_ids=action.stop,
                    logprobs=0 if action.logprobs else None,
                )
    engine.run()
    check()
    for name, request in sent.items():
        wanted = engine.expected(request.prompt, min(request.max_tokens, engine.engine.context - len(request.prompt)))
        reason = FinishReason.LENGTH
        ends = [i for i, token in enumerate(wanted) if token in request.stop]
        if ends:
            wanted, reason = wanted[: ends[0] + 1], FinishReason.STOP
        got = engine.tokens(name)
        if engine.reason(name) is FinishReason.CANCELLED:
            assert name in aborted
            assert got == wanted[: len(got)]
        else:
            assert (got, engine.reason(name)) == (wanted, reason)
        if request.logprobs:
            assert [e.ids[0] for event in engine.events[name] for e in event.logprobs or ()] == got
    stats = engine.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert all(group.used == 0 for group in stats.groups)
    assert stats.state_slots.used == 0
    assert NEVER not in {token for name in sent for token in engine.tokens(name)}
