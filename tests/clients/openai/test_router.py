"""Where a prompt goes: the replica that has its beginning, unless it is too busy."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.openai.config import Replica, ShimConfig
from clients.openai.errors import ApiError, BackendError
from clients.openai.metrics import ShimMetrics
from clients.openai.router import PrefixIndex, ReplicaState, Router
from clients.openai.triton import TritonReplica
from clients.openai.wire import Generation, ModelInfo, Piece, Prompt, from_status


class Server(TritonReplica):
    """A replica that is never called: only its address counts here."""

    def __init__(self, address: Replica) -> None:
        self.address = address


class Failing(Server):
    """Refuses this many requests with an error of the server's, then answers with one piece."""

    def __init__(self, address: Replica, refusals: int, message: str) -> None:
        super().__init__(address)
        self.refusals, self._message = refusals, message

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        if self.refusals > 0:
            self.refusals -= 1
            raise from_status("INTERNAL", self._message)
        yield Piece("text", (1,), "stop", 1, 0, generation.index)


class Checked(Server):
    """Answers checks until it is `down`: then each ends with this status."""

    down: str | None = None

    async def models(self) -> tuple[dict[str, ModelInfo], frozenset[str]]:
        if self.down is not None:
            raise from_status(self.down, "no answer")
        return {"demo": ModelInfo("demo")}, frozenset()


def router(count: int, **settings: object) -> Router:
    config = ShimConfig(replicas=tuple(Replica.parse(f"h{i}:1") for i in range(count)), **settings)  # type: ignore[arg-type]
    made = Router(config, ShimMetrics())
    info = {"demo": ModelInfo("demo")}
    made.replicas = [ReplicaState(Server(address), info, healthy=True, answers=True) for address in config.replicas]
    return made


def test_the_longest_known_beginning_wins() -> None:
    index = PrefixIndex(chunk=4)
    index.add(b"aaaabbbb", "one")
    index.add(b"aaaacccc", "two")
    assert index.find(b"aaaabbbbdddd") == "one"
    assert index.find(b"aaaaccccdddd") == "two"
    assert index.find(b"aaaazzzz") == "two"  # both have it; the later one has it freshest
    assert index.find(b"zzzz") is None


def test_what_was_not_used_longest_is_forgotten_first() -> None:
    index = PrefixIndex(chunk=4, capacity=4)
    index.add(b"aaaa", "one")
    index.add(b"bbbb", "two")
    index.find(b"aaaa")
    index.add(b"cccc", "one")
    assert index.find(b"bbbb") is None
    assert index.find(b"aaaa") == "one"
    assert len(index) == 2
    index.forget("one")
    assert len(index) == 0


@given(st.lists(st.integers(0, 40), max_size=200))
def test_the_half_that_was_used_latest_is_known(used: list[int]) -> None:
    index = PrefixIndex(chunk=4, capacity=20)
    for number in used:
        index.add(f"{number:04}".encode(), str(number))
        assert len(index) <= 20
    for number in list(dict.fromkeys(reversed(used)))[:9]:
        assert index.find(f"{number:04}".encode()) == str(number)


def test_without_a_known_beginning_the_least_loaded_replica_is_taken() -> None:
    r = router(3)
    for state, load in zip(r.replicas, (5, 1, 4), strict=True):
        state.open_requests = load
    assert r.pick("demo", b"x" * 600).name == "h1:1"


def test_equal_beginnings_go_to_the_same_replica_until_it_is_too_busy() -> None:
    r = router(2, affinity_slack=3)
    first = r.pick("demo", b"shared" * 200 + b"one")
    first.open_requests = 3
    assert r.pick("demo", b"shared" * 200 + b"two") is first
    first.open_requests = 4
    assert r.pick("demo", b"shared" * 200 + b"three") is not first


def test_affinity_can_be_turned_off() -> None:
    r = router(2, affinity=False)
    first = r.pick("demo", b"shared" * 200)
    first.open_requests = 1
    assert r.pick("demo", b"shared" * 200) is not first


def test_a_cache_key_decides_whatever_the_prompt_is() -> None:
    r = router(2)
    first = r.pick("demo", Prompt(text="a" * 999, affinity="session-1").key)
    first.open_requests = 2
    assert r.pick("demo", Prompt(text="b" * 999, affinity="session-1").key) is first


def test_replicas_that_are_down_or_tried_are_left_out() -> None:
    r = router(3)
    r.replicas[0].healthy = False
    assert r.pick("demo", b"k", without=["h1:1"]).name == "h2:1"
    with pytest.raises(BackendError, match="No replica can serve"):
        r.pick("demo", b"k", without=["h1:1", "h2:1"])


def test_a_replica_that_waits_for_its_engine_is_taken_where_no_other_is_left() -> None:
    r = router(2)
    waits = {"demo": ModelInfo("demo", problem="the engine process has said nothing for 2 s")}
    r.replicas[0].models = waits
    assert {r.pick("demo", bytes([n])).name for n in range(8)} == {"h1:1"}
    assert r.ready == {"demo"}
    assert r.pick("demo", b"k", without=["h1:1"]).name == "h0:1"
    r.replicas[1].models = waits
    assert r.pick("demo", b"k")
    assert r.ready == frozenset()
    assert r.model("demo").name == "demo", "its requests wait; it is no unknown model"


def test_a_replica_that_answers_late_is_taken_where_no_other_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a machine is overloaded: a request that waits is better off than one that is refused."""
    r = router(2)
    servers = [Checked(state.server.address) for state in r.replicas]
    r.replicas = [ReplicaState(server) for server in servers]

    def check() -> None:
        for state in r.replicas:
            asyncio.run(r._check_one(state))

    check()
    servers[0].down = "DEADLINE_EXCEEDED"
    check()
    assert {r.pick("demo", bytes([n])).name for n in range(8)} == {"h1:1"}
    assert r.pick("demo", b"k", without=["h1:1"]).name == "h0:1"
    servers[1].down = "UNAVAILABLE"
    check()
    assert r.ready == frozenset()
    assert r.model("demo").name == "demo"
    assert r.pick("demo", b"k").name == "h0:1", "nobody listens at the other"
    later = time.monotonic() + 10
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(ApiError):
        r.model("demo")


def test_an_unknown_model_is_404_and_no_server_is_503() -> None:
    r = router(1)
    with pytest.raises(ApiError) as unknown:
        r.model("nope")
    assert (unknown.value.status, unknown.value.param) == (404, "model")
    assert "demo" in unknown.value.message
    r.replicas[0].healthy = r.replicas[0].answers = False
    with pytest.raises(ApiError) as down:
        r.model("demo")
    assert down.value.status == 503
    assert "Retry-After" in down.value.headers


def test_a_model_that_is_being_loaded_is_503_and_one_that_was_unloaded_404() -> None:
    r = router(1)
    r.replicas[0].waited = frozenset({"coming"})
    with pytest.raises(ApiError) as coming:
        r.model("coming")
    assert (coming.value.status, coming.value.code) == (503, "model_not_ready")
    r.replicas[0].models, r.replicas[0].healthy = {}, False  # the last one has gone: the server answers still
    with pytest.raises(ApiError) as gone:
        r.model("demo")
    assert gone.value.status == 404


@pytest.mark.parametrize(
    ("text", "grpc", "metrics"),
    [
        ("localhost:8001", "localhost:8001", "http://localhost:8002/metrics"),
        ("10.0.0.2:81:82", "10.0.0.2:81", "http://10.0.0.2:82/metrics"),
        ("[::1]:81", "[::1]:81", "http://[::1]:8002/metrics"),
    ],
)
def test_replica_addresses(text: str, grpc: str, metrics: str) -> None:
    assert Replica.parse(text) == Replica(grpc, metrics)


def test_a_name_may_stand_for_every_address_behind_it() -> None:
    name = Replica.parse("dns:triton-headless:81:82")
    assert name.every_address
    assert name.at("10.0.0.7") == Replica("10.0.0.7:81", "http://10.0.0.7:82/metrics")
    assert name.at("fd00::7") == Replica("[fd00::7]:81", "http://[fd00::7]:82/metrics")


def test_servers_come_and_go_with_their_addresses() -> None:
    async def run() -> None:
        here = Router(ShimConfig(replicas=(Replica.parse("dns:localhost:1"),)), ShimMetrics())
        await here.check()
        assert {state.name for state in here.replicas} <= {"127.0.0.1:1", "[::1]:1"}
        assert here.replicas
        assert not any(state.healthy for state in here.replicas)
        await here.close()
        nowhere = Router(ShimConfig(replicas=(Replica.parse("dns:no-such-host.invalid:1"),)), ShimMetrics())
        gone = ReplicaState(TritonReplica(Replica.parse("10.0.0.1:1")), healthy=True, open_requests=1)
        nowhere.replicas = [gone]
        await nowhere.check()
        assert nowhere.replicas == [gone]  # its open request ends first
        assert not gone.healthy
        gone.open_requests = 0
        await nowhere.check()
        assert nowhere.replicas == []

    asyncio.run(run())


def test_replicas_that_do_not_answer_are_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """A port that nobody listens on; one that is ready later is no warning."""

    class Ready(Server):
        async def models(self) -> tuple[dict[str, ModelInfo], frozenset[str]]:
            return {"demo": ModelInfo("demo")}, frozenset()

        async def close(self) -> None:
            pass

    caplog.set_level(logging.INFO, "nereid.openai")

    async def run() -> None:
        addresses = tuple(Replica.parse(text) for text in ("127.0.0.1:1", "h:1"))
        made = Router(ShimConfig(replicas=addresses), ShimMetrics())
        made.replicas = [ReplicaState(TritonReplica(addresses[0])), ReplicaState(Ready(addresses[1]))]
        await made.start()
        await made.close()

    asyncio.run(run())
    said = {record.getMessage().split(":1 ")[0]: record for record in caplog.records}
    assert said["replica 127.0.0.1"].levelname == "WARNING"
    assert "is not ready: it does not answer" in said["replica 127.0.0.1"].getMessage()
    assert (said["replica h"].levelname, said["replica h"].getMessage()) == ("INFO", "replica h:1 is ready")


@pytest.mark.parametrize("text", ["localhost", "localhost:", "http://x:1", ":8001"])
def test_wrong_replica_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:GRPC_PORT"):
        Replica.parse(text)


async def pieces(r: Router) -> list[Piece]:
    generation = Generation("demo", "r-1", Prompt(text="hello"), sampling={}, stream=True, deadline=math.inf)
    return [piece async for piece in r.generate(generation)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_request_that_meets_a_dead_instance_is_tried_again_on_the_same_replica_too(replicas: int) -> None:
    r = router(replicas)
    for state in r.replicas:
        state.server = Failing(state.server.address, 2, "Stub process 'demo_1_0' is not healthy.")
    assert [piece.text for piece in asyncio.run(pieces(r))] == ["text"]
    assert all(state.open_requests == 0 for state in r.replicas)


def test_a_replica_without_a_living_instance_is_given_up_as_unavailable() -> None:
    r = router(1)
    r.replicas[0].server = failing = Failing(r.replicas[0].server.address, 99, "Stub process 'm_0_0' is not healthy.")
    with pytest.raises(BackendError) as refused:
        asyncio.run(pieces(r))
    assert (refused.value.code, refused.value.to_api().status) == ("UNAVAILABLE", 503)
    assert 99 - failing.refusals == 6


def test_other_errors_of_a_server_are_not_tried_again() -> None:
    r = router(1)
    r.replicas[0].server = failing = Failing(r.replicas[0].server.address, 9, "a fault of its own")
    with pytest.raises(BackendError, match="The model's server failed on this request"):
        asyncio.run(pieces(r))
    assert failing.refusals == 8
