"""Whatever comes in, in whatever order, with whatever memory: the tokens are the model's, each request ends once, and
every block and slot is accounted for after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.spec import PoolSpec
from engine.config import EngineConfig
from engine.types import FinishReason
from tests.core.harness import Harness, make_config
from tests.core.scripted_runner import EOS, ScriptedRunner, pool


@dataclass(frozen=True)
class Submit:
    prompt: list[int]
    max_tokens: int
    priority: int
    ignore_eos: bool
    replayed: int
    prompt_logprobs: bool


@dataclass(frozen=True)
class Abort:
    index: int


@dataclass(frozen=True)
class Steps:
    count: int


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts over a few common beginnings, so that prefixes are shared, partly shared and not shared."""
    bases = [list(range(2, 30)), [7] * 20, [*range(2, 14), 40, 41, 42, 43, 44, 45]]
    tail = st.lists(st.integers(2, 9), min_size=1, max_size=12)
    return st.tuples(st.sampled_from(bases), st.sampled_from([28, 20, 16, 12, 7, 0]), tail).map(
        lambda t: t[0][: t[1]] + t[2]
    )


submits = st.builds(
    Submit,
    prompts(),
    st.sampled_from([14, 9, 3, 2, 1]),
    st.integers(-1, 1),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 3]),
    st.sampled_from([False, False, False, True]),
)
actions = st.lists(
    st.one_of(submits, submits, submits, st.builds(Abort, st.integers(0, 11)), st.builds(Steps, st.integers(1, 6))),
    min_size=8,
    max_size=24,
)

WINDOWED = {"window": st.sampled_from([1, 5, 8]), "window_blocks": st.integers(5, 24)}
STATE = {"state_slots": st.integers(2, 8)}
pools = st.one_of(
    st.sampled_from([2, 4, 8]).flatmap(
        lambda size: st.builds(pool, st.integers(42 // size + 2, 80 // size), st.just(size))
    ),
    st.builds(pool, st.integers(13, 40), **WINDOWED),
    st.builds(pool, **WINDOWED, full=st.just(False)),
    st.builds(pool, st.integers(13, 40), **STATE),
    st.builds(pool, st.integers(13, 40), **WINDOWED, **STATE),
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    rows = draw(st.integers(1, 5))
    return make_config(
        prefix_cache=draw(st.booleans()),
        overlap=draw(st.booleans()),
        delay_launch=draw(st.booleans()),
        max_rows=rows,
        token_budget=draw(st.integers(rows, 40)),
        chunk_size=draw(st.sampled_from([0, 1, 3, 7])),
        mixed_budget=draw(st.sampled_from([None, 1, 4])),
        preference=draw(st.sampled_from(["latency", "balanced", "throughput"])),
    )


@settings(max_examples=200, deadline=None)
@given(spec=pools, config=configs(), actions=actions)
def test_any_load(spec: PoolSpec, config: EngineConfig, actions: list[Submit | Abort | Steps]) -> None:
    harness = Harness(ScriptedRunner(spec, step_s=0.01), config)
    sent: dict[str, Submit] = {}
    aborted: set[str] = set()
    for action in actions:
        match action:
            case Steps(count):
                harness.step(count) if harness.loop.live or harness.inflight else None
            case Abort(index):
                harness.engine.abort(str(index))
                aborted.add(str(index))
            case Submit():
                name = str(len(sent))
                aborted.discard(name)
                sent[name] = action
                replayed = min(action.replayed, action.max_tokens, harness.engine.context - len(action.prompt))
                harness.submit(
                    name,
                    action.prompt,
                    harness.expected(action.prompt, replayed),
                    max_tokens=action.max_tokens,
                    priority=action.priority,
                    ignore_eos=action.ignore_eos,
                    prompt_logprobs=0 if action.prompt_logprobs else None,
                )
    harness.run()
    for name, request in sent.items():
        room = harness.engine.context - len(request.prompt)
        replayed = min(request.replayed, request.max_tokens, room)
        wanted = harness.expected(request.prompt, min(request.max_tokens, room))
        reason = FinishReason.LENGTH
        if not request.ignore_eos and EOS in wanted:
            # A replayed end of sequence that is not the last of output_ids was generated under other rules.
            wanted = wanted[: max(wanted.index(EOS) + 1, replayed)]
            reason = FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH
            if EOS in wanted[: replayed - 1]:
                continue
        got = harness.tokens(name)
        if harness.reason(name) is FinishReason.CANCELLED:
            assert name in aborted
            assert got == wanted[replayed:][: len(got)]
        else:
            assert got == wanted[replayed:]
            assert harness.reason(name) is reason
        logprobs = [e.prompt_logprobs for e in harness.events[name] if e.prompt_logprobs is not None]
        if request.prompt_logprobs and not replayed and got:
            (entries,) = logprobs
            assert entries[0] is None
            assert [e.logprobs[0] for e in entries[1:] if e] == [-float(p) for p in range(1, len(request.prompt))]
    stats = harness.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert all(group.used == 0 for group in stats.groups)
    assert stats.state_slots.used == 0


@pytest.mark.parametrize("seed", range(12))
def test_heavy_load(seed: int) -> None:
    """Forty long requests over three beginnings, in pools that hold a few of them: preemption is the rule."""
    random_ = random.Random(seed)
    kind = seed % 4
    spec = pool(
        random_.randint(34, 60),
        window=random_.choice([3, 8, 17]) if kind in (1, 3) else None,
        window_blocks=random_.randint(9, 20),
        full=seed % 8 != 7,
        state_slots=random_.randint(2, 8) if kind in (2, 3) else 0,
    )
    rows = random_.randint(2, 8)
    config = make_config(
        overlap=seed % 3 > 0,
        max_rows=rows,
        token_budget=random_.randint(rows, 100),
        chunk_size=random_.choice([0, 5, 16]),
    )
    harness = Harness(ScriptedRunner(spec), config)
    beginnings = [[random_.randint(2, 9) for _ in range(90)] for _ in range(3)]
    sent: dict[str, list[int]] = {}
    for i in range(40):
        name, tail = str(i), [random_.randint(2, 9) for _ in range(random_.randint(1, 20))]
        sent[name] = random_.choice(beginnings)[: random_.randint(0, 90)] + tail
        harness.submit(name, sent[name], max_tokens=random_.randint(1, 40), priority=random_.choice([0, 0, 1]))
        if random_.random() < 0.1:
            harness.engine.abort(str(random_.randrange(i + 1)))
        if random_.random() < 0.5:
            harness.step(random_.randint(1, 5))
    harness.run()
    for name, prompt in sent.items():
        got = harness.tokens(name)
        assert got == harness.expected(prompt, len(got))
        assert harness.reason(name) in (FinishReason.LENGTH, FinishReason.CANCELLED)
