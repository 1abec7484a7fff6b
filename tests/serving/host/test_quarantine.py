"""Suspects run one by one, before all others, and what an engine dies of ends by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.serving.host.quarantine import Quarantine
from engine.serving.link.messages import NOBODY
from tests.serving import stub
from tests.serving.rig import LONG, Rig
from tests.serving.scripted_host import POISON
from tests.serving.stub import Request, tokens_of

FATAL = "the engine died 3 times while it ran this request, so it is not tried again"


def poison(running: Rig) -> Request:
    request = Request(parameters=LONG, input_ids=[POISON, 3, 4], stream=True)
    running.frontend.submit(request)
    return request


def at_once(running: Rig, submit: Callable[[], list[Request]]) -> list[Request]:
    """Requests that the engine meets in one step: it stands still while they are sent."""
    engine = running.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    requests = submit()
    os.kill(engine, signal.SIGCONT)
    return requests


def deaths(running: Rig) -> int:
    state = running.folder.read_state()
    assert state is not None
    return state.epoch - 1


@pytest.mark.parametrize("poisons", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_request_that_kills_the_engine_ends_and_those_beside_it_go_on(rig: Callable[..., Rig], poisons: int) -> None:
    """Whichever frontend they came by. Deaths that a request is to blame for do not end the model: with two of them
    the engine dies four times in a row, and three are allowed."""
    one, other = rig(), rig(name="f1")
    expected = [tokens_of(one.submit(seed).all()) for seed in range(4)]

    def submit() -> list[Request]:
        first = [one.submit(0), poison(one), other.submit(1), one.submit(2)]
        return [*first, *([poison(other)] if poisons == 2 else []), other.submit(3)]

    requests = at_once(one, submit)
    fatal = [requests[1], *([requests[4]] if poisons == 2 else [])]
    for request in fatal:
        with pytest.raises(stub.Error, match=FATAL) as caught:
            request.all()
        assert caught.value.code == stub.Error.INTERNAL, "what is unavailable is tried on another replica"
    assert [tokens_of(request.all()) for request in requests if request not in fatal] == expected
    assert deaths(one) == 2 + poisons
    assert tokens_of(one.submit(0).all()) == expected[0]
    assert one.engine.failed is None


def test_deaths_of_an_engine_that_starts_are_no_requests_fault(rig: Callable[..., Rig]) -> None:
    running = rig(restart_limit=20)
    expected = [tokens_of(running.submit(seed).all()) for seed in range(3)]
    requests = [running.submit(seed) for seed in range(3)]
    for _ in range(5):
        before = running.engine_pid()
        running.kill()
        while running.engine_pid() == before:
            time.sleep(0.002)
    assert [tokens_of(request.all()) for request in requests] == expected


def test_an_engine_that_dies_whatever_it_runs_is_given_up(rig: Callable[..., Rig]) -> None:
    """Deaths are blamed on what ran alone, but each such death ends a request."""
    running = rig(restart_limit=2)
    requests = at_once(running, lambda: [poison(running), poison(running)])
    for request in requests:
        with pytest.raises(stub.Error, match=FATAL):
            request.all()
    requests = [poison(running)]
    with pytest.raises(stub.Error, match="It was started 5 times in a row and will not be started again"):
        requests[0].all()


class Gate:
    """A quarantine whose engine is a list."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.told: list[str | None] = []
        self.quarantine = Quarantine[str](self.ran.append, self.told.append, clock=lambda: self.now)


def test_nothing_runs_until_every_frontend_has_sent_what_it_had() -> None:
    gate = Gate()
    gate.quarantine.gather(["a", "b"])
    gate.quarantine.take("1", "1", suspect=False)
    gate.quarantine.sent("a")
    gate.quarantine.take("2", "2", suspect=True)
    gate.quarantine.take("3", "3", suspect=True)
    assert gate.ran == []
    gate.quarantine.sent("b")
    assert (gate.ran, gate.told) == (["2"], ["2"])
    gate.quarantine.passed("2")
    assert (gate.ran, gate.told) == (["2", "3"], ["2", "3"])
    gate.quarantine.passed("3")
    assert (gate.ran, gate.told) == (["2", "3", "1"], ["2", "3", None])


def test_a_frontend_that_stands_still_is_not_waited_for_long() -> None:
    gate = Gate()
    gate.quarantine.gather(["a"])
    gate.quarantine.take("1", "1", suspect=False)
    gate.now = 2.5
    gate.quarantine.look()
    assert gate.ran == ["1"]


def test_a_suspect_that_comes_late_is_blamed_alone_and_holds_others_up_until_its_token() -> None:
    gate = Gate()
    gate.quarantine.gather([])
    gate.quarantine.take("1", "1", suspect=False)
    gate.quarantine.take("2", "2", suspect=True)
    gate.quarantine.take("3", "3", suspect=False)
    assert (gate.ran, gate.told) == (["1", "2"], [None, "2"])
    gate.quarantine.passed("2")
    assert (gate.ran, gate.told) == (["1", "2", "3"], [None, "2", None])


class Machine(RuleBasedStateMachine):
    """Whatever comes in whatever order: each request that is not dropped runs once, and suspects alone."""

    @initialize(frontends=st.sets(st.sampled_from("abc")))
    def begin(self, frontends: set[str]) -> None:
        self.gate = Gate()
        self.wanted: set[str] = set()
        self.suspects: set[str] = set()
        self.serial = 0
        self.gate.quarantine.gather(frontends)

    @rule(suspect=st.booleans())
    def take(self, suspect: bool) -> None:
        self.serial += 1
        name = str(self.serial)
        self.wanted.add(name)
        if suspect:
            self.suspects.add(name)
        before = len(self.gate.ran)
        self.gate.quarantine.take(name, name, suspect)
        assert len(self.gate.ran) <= before + 1

    @rule(frontend=st.sampled_from("abc"))
    def sent(self, frontend: str) -> None:
        self.gate.quarantine.sent(frontend)

    @rule(place=st.integers(0, 20))
    def drop(self, place: int) -> None:
        waiting = sorted(self.wanted - set(self.gate.ran))
        if waiting:
            name = waiting[place % len(waiting)]
            self.wanted.discard(name)
            self.gate.quarantine.drop([name])

    @precondition(lambda self: self.gate.quarantine.alone)
    @rule()
    def passed(self) -> None:
        self.gate.quarantine.passed(self.gate.quarantine.alone or "")

    @invariant()
    def all_or_one(self) -> None:
        alone, ran = self.gate.quarantine.alone, self.gate.ran
        assert len(ran) == len(set(ran))
        assert set(ran) <= self.wanted
        assert len(self.gate.quarantine) == len(self.wanted - set(ran))
        if alone is None:
            assert set(ran) == self.wanted
        elif alone == NOBODY:
            assert ran == []
        else:
            assert ran[-1] == alone
            assert alone in self.suspects
        if self.gate.told:
            assert self.gate.told[-1] == alone


TestMachine = Machine.TestCase


@given(st.lists(st.booleans(), max_size=12))
def test_all_that_wait_have_run_when_every_suspect_has_passed(kinds: list[bool]) -> None:
    gate = Gate()
    gate.quarantine.gather(["a"])
    for place, suspect in enumerate(kinds):
        gate.quarantine.take(str(place), str(place), suspect)
    gate.quarantine.sent("a")
    while gate.quarantine.alone:
        gate.quarantine.passed(gate.quarantine.alone)
    suspects = [str(place) for place, suspect in enumerate(kinds) if suspect]
    assert gate.ran == suspects + [str(place) for place, suspect in enumerate(kinds) if not suspect]
