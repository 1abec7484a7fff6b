"""What can go wrong: each kind of fault does it, undoes it, and waits until the fleet has come back."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonclient.grpc import InferenceServerClient

from tests.chaos import hostile
from tests.chaos.clients import perform
from tests.chaos.fleet import EXIT_TIMEOUT_S, EXTRA, WORKERS, Fleet, FleetFailed, Replica, until
from tests.chaos.schedule import Fault, Shape
from tests.chaos.watch import PROBE, Heartbeat

RECOVERY_S = 30.0  # after which a replica that answers no probe has not come back
NEWBORN_S = 20.0  # for a process to take the place of one that was killed
WHOLE_S = 60.0  # for frontends to be complete: behind deaths in a row the next start waits for 32 s
_LOOK_S = 0.2
_STUBS = ("frontend", "tokenizer")
_LOADED = ("engine", *_STUBS)  # what a first load starts
_STUB_STOPS = (0.1, 0.5)  # seconds; 2.51 kills a stub that stands still for one
_TORN = {"unavailable", "broken", "stub"}  # ends of requests whose way was cut


class Problem(Exception):
    """A promise about the fault itself was broken."""


@dataclass(frozen=True)
class Kind:
    """run: does the fault and undoes it. direct, shim: classes of errors that requests over Triton's own ports and
    through the shim may end with meanwhile (`invariants.classify`); in no case a wrong token. stops: it holds up
    what answers, so its time is added to deadlines. queues: what comes over Triton's own ports waits in its queue until
    there are frontends again, which is when its time begins."""

    run: Callable[[Fleet, Fault], None]
    shape: Shape = field(default_factory=Shape)
    direct: frozenset[str] = frozenset()
    shim: frozenset[str] = frozenset()
    stops: bool = False
    queues: bool = False


def apply(fleet: Fleet, fault: Fault, beat: Heartbeat) -> str | None:
    """Do the fault and wait until its replica answers again, or another fault ends it as a whole; a sentence when a
    promise was broken."""
    replica, kind = fleet.replicas[fault.replica], KINDS[fault.kind]
    replica.faults += 1
    number, ends, began = replica.faults, replica.ends, time.monotonic()
    try:
        kind.run(fleet, fault)
    except hostile.LateError as late:
        if late.seconds > late.limit_s + beat.late(began, time.monotonic()):
            return str(late)
    except Problem as problem:
        if replica.ends == ends or kind.shape.ends:  # else another fault has ended what this one was about
            return str(problem)
    answers = _comes_back(fleet, fault, replica.ends if kind.shape.ends else ends, beat)
    if kind.queues:
        until(lambda: replica.ends > ends or _is_whole(fleet, replica), WHOLE_S)
    if answers or replica.faults > number:  # the last fault's time tells
        return None
    return f"replica {replica.number} answers no probe {RECOVERY_S:g} s after it"


def _comes_back(fleet: Fleet, fault: Fault, ends: int, beat: Heartbeat) -> bool:
    """Whether a replica answers in time, or is ended meanwhile, which it had been so `ends` times."""
    replica, began = fleet.replicas[fault.replica], time.monotonic()
    while not (replica.ends > ends or _answers(fleet, fault.replica)):
        now = time.monotonic()
        if now > began + RECOVERY_S + beat.late(began, now):
            return False
        time.sleep(_LOOK_S)
    return True


def _is_whole(fleet: Fleet, replica: Replica) -> bool:
    """Whether all frontends are there and serve: a dead one refuses its share of the requests, also while the process
    in its place starts."""
    if len(replica.pids("frontend")) < replica.frontends or replica.replaces():
        return False
    return all(perform(fleet, PROBE, str(replica.number)).error is None for _ in range(2 * replica.frontends))


def _answers(fleet: Fleet, number: int) -> bool:
    if len(fleet.shim.workers()) < WORKERS or fleet.shim.health() != 200:
        return False
    return fleet.replicas[number].says_ready() and perform(fleet, PROBE, str(number)).error is None


def pids(fleet: Fleet, fault: Fault, role: str) -> list[int]:
    return fleet.shim.workers() if role == "worker" else fleet.replicas[fault.replica].pids(role)


def picked(fleet: Fleet, fault: Fault, role: str) -> list[int]:
    found = pids(fleet, fault, role)
    return [found[fault.pick % len(found)]] if found else []


def kill(role: str, everyone: bool = False) -> Callable[[Fleet, Fault], None]:
    """kill -9; repeated on what comes in the killed ones' place, hold_s after it has appeared, unless another fault
    ends the replica: what is killed in its first load ends that, as is promised."""

    def run(fleet: Fleet, fault: Fault) -> None:
        ends = fleet.replicas[fault.replica].ends
        for turn in range(fault.times):
            if fleet.replicas[fault.replica].ends > ends:
                return
            old = pids(fleet, fault, role) if everyone else picked(fleet, fault, role)
            fleet.replicas[fault.replica].hit_stub |= role in _STUBS
            fleet.replicas[fault.replica].kills[role] += len(old)
            for pid in old:
                _signal(pid, signal.SIGKILL)
            fleet.replicas[fault.replica].lost_frontend |= role == "frontend"
            if turn + 1 < fault.times:
                many = len(old) if everyone else 1
                before = set(pids(fleet, fault, role)) - set(old)
                until(lambda: len(set(pids(fleet, fault, role)) - before - set(old)) >= many, NEWBORN_S)  # noqa: B023
                time.sleep(fault.hold_s)

    return run


def stop(role: str) -> Callable[[Fleet, Fault], None]:
    """SIGSTOP, and SIGCONT after a while."""

    def run(fleet: Fleet, fault: Fault) -> None:
        found = picked(fleet, fault, role)
        replica = fleet.replicas[fault.replica]
        replica.hit_stub |= role in _STUBS
        replica.lost_frontend |= role == "frontend" and fault.hold_s > _STUB_STOPS[1]
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        time.sleep(fault.hold_s)
        for pid in found:
            _signal(pid, signal.SIGCONT)

    return run


def end(role: str, number: int) -> Callable[[Fleet, Fault], None]:
    """A signal to what holds a replica together, which is then started again. A gRPC stream on which nothing was sent
    is open meanwhile."""

    def run(fleet: Fleet, fault: Fault) -> None:
        replica = fleet.replicas[fault.replica]
        with replica.reviving, idle_stream(replica):
            for pid in replica.pids(role):
                _signal(pid, number)
            start_again(replica, f"{signal.Signals(number).name} of the {role}")

    return run


def start_again(replica: Replica, why: str) -> None:
    """As an orchestrator does: again where a kill ends the first load, as is promised. Raises Problem unless all of
    what was there is gone in time, its ports free."""
    replica.ends += 1
    gone = until(lambda: not list(replica.members()), EXIT_TIMEOUT_S + 5.0 + 1.0, look_s=0.1)
    listening = replica.listens()
    left = replica.wipe()
    while True:
        kills = _kills(replica, _LOADED)
        replica.start()
        try:
            replica.wait_ready()
            break
        except FleetFailed:
            if replica.alive() or _kills(replica, _LOADED) == kills:
                raise
    if not gone:
        raise Problem(f"left {EXIT_TIMEOUT_S + 5} s after {why}: {left}")
    if listening:
        raise Problem(f"a port is not free after {why}")


def _kills(replica: Replica, roles: tuple[str, ...]) -> int:
    return sum(replica.kills[role] for role in roles)


def remove_run_folder(fleet: Fleet, fault: Fault) -> None:
    """As those that sweep temporary folders do, and then the engine dies."""
    for entry in fleet.replicas[fault.replica].run_folder.iterdir():
        shutil.rmtree(entry, ignore_errors=True)
        entry.unlink(missing_ok=True) if not entry.is_dir() else None
    time.sleep(0.5)
    kill("engine")(fleet, fault)


def fill_disk(fleet: Fleet, fault: Fault) -> None:
    """No byte more can be written to the run folder, and the engine dies meanwhile."""
    replica = fleet.replicas[fault.replica]
    with _full(replica):
        kill("engine")(fleet, fault)
        time.sleep(fault.hold_s)


@contextlib.contextmanager
def _full(replica: Replica) -> Iterator[None]:
    if not replica.mounted:
        with contextlib.ExitStack() as limits:
            for pid in replica.pids("frontend"):
                limits.enter_context(_limited(pid, resource.RLIMIT_FSIZE, 0))
            yield
        return
    ballast = replica.run_folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink(missing_ok=True)


def starve_descriptors(fleet: Fleet, fault: Fault) -> None:
    """A process may open hardly any file more."""
    role = ("server", "engine", "frontend", "worker")[fault.pick % 4]
    for pid in pids(fleet, fault, role)[:1]:
        highest = max((int(fd) for fd in os.listdir(f"/proc/{pid}/fd")), default=0)
        with _limited(pid, resource.RLIMIT_NOFILE, highest + 2):
            time.sleep(fault.hold_s)


def starve_memory(fleet: Fleet, fault: Fault) -> None:
    """A process may map hardly any memory more."""
    role = ("engine", "frontend", "worker")[fault.pick % 3]
    for pid in pids(fleet, fault, role)[:1]:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        with _limited(pid, resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + (8 << 20)):
            time.sleep(fault.hold_s)


@contextlib.contextmanager
def _limited(pid: int, what: int, most: int) -> Iterator[None]:
    try:
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, before[1]))
    except ProcessLookupError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


def read_slowly(fleet: Fleet, fault: Fault) -> None:
    """Clients that ask for much and take a few bytes a second, half of them over the shim; then they are gone."""
    replica = fleet.replicas[fault.replica]
    fields = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    shim = _post("/v1/completions", {"model": "demo", "prompt": "slow", "timeout": 20, **fields})
    direct = _post("/v2/models/demo/generate_stream", {"text_input": "slow", **fields})
    open_ = [_connect(port) for port in (fleet.shim.port, fleet.shim.port, replica.http_port, replica.http_port)]
    for connection, data in zip(open_, (shim, shim, direct, direct), strict=True):
        connection.sendall(data)
    ended = time.monotonic() + fault.hold_s
    while time.monotonic() < ended:
        for connection in open_:
            with contextlib.suppress(OSError):
                connection.recv(64, socket.MSG_DONTWAIT)
        time.sleep(0.5)
    for connection in open_:
        connection.close()


def half_open(fleet: Fleet, fault: Fault) -> None:
    """Connections on which half a request was sent and nothing more; in the end half of them are reset."""
    replica = fleet.replicas[fault.replica]
    body = _post("/v1/completions", {"model": "demo", "prompt": "half"})
    halves = [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: ", body[:-5]]
    ports = (fleet.shim.port, replica.http_port, replica.grpc_port)
    with idle_stream(replica):
        open_ = []
        for port in ports:
            for turn in range(12):
                connection = _connect(port)
                connection.sendall(halves[turn % 3] if port != replica.grpc_port else b"PRI * HTTP/2.0\r\n"[: turn + 1])
                open_.append(connection)
        time.sleep(fault.hold_s)
        for turn, connection in enumerate(open_):
            if turn % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


@contextlib.contextmanager
def idle_stream(replica: Replica) -> Iterator[None]:
    """A bidirectional gRPC stream on which nothing is sent."""
    client = InferenceServerClient(replica.grpc)
    client.start_stream(lambda result, error: None)
    try:
        yield
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def send_hostile(fleet: Fleet, fault: Fault) -> None:
    name = sorted(hostile.BODIES)[fault.pick % len(hostile.BODIES)]
    hostile_named(name)(fleet, fault)


def hostile_named(name: str) -> Callable[[Fleet, Fault], None]:
    def run(fleet: Fleet, fault: Fault) -> None:
        problem = hostile.BODIES[name](fleet, fleet.replicas[fault.replica])
        if problem is not None:
            raise Problem(f"{name}: {problem}")

    return run


def load_and_unload(fleet: Fleet, fault: Fault) -> None:
    """Another model comes and goes beside the one that is asked."""
    replica = fleet.replicas[fault.replica]
    status, body = replica.get(f"/v2/repository/models/{EXTRA}/load", b"{}", 60.0)
    if status != 200:
        raise Problem(f"the model {EXTRA} does not load: {status} {body[:300]!r}")
    ask = json.dumps({"text_input": "a", "max_tokens": 2}).encode()
    status, body = replica.get(f"/v2/models/{EXTRA}/generate", ask, 30.0)
    time.sleep(fault.hold_s)
    replica.get(f"/v2/repository/models/{EXTRA}/unload", b"{}", 60.0)
    if not until(lambda: not replica.says_ready(EXTRA), 40.0):
        raise Problem(f"the model {EXTRA} does not unload")
    if status != 200:
        raise Problem(f"the model {EXTRA} does not answer after its load: {status} {body[:300]!r}")


def jump_clock(fleet: Fleet, fault: Fault) -> None:
    """The wall clock jumps, an hour, a day or ten years, forward or back, and back to where it was."""
    fleet.set_clock((3600, -3600, 86_400, -86_400, 10 * 365 * 86_400)[fault.pick % 5])
    time.sleep(fault.hold_s)
    fleet.set_clock(0)


def scale(fleet: Fleet, fault: Fault) -> None:
    """One frontend less or one more, and back, as docs/environment.md says to do it."""
    replica = fleet.replicas[fault.replica]
    with replica.scaling:  # one behind the other, for each goes back to what it found
        config = replica.config()
        if config is not None:
            _scaled(replica, config, fault)


def _scaled(replica: Replica, config: dict[str, Any], fault: Fault) -> None:
    replica.keeps_frontends |= replica.lost_frontend
    groups: Any = config["instance_group"]
    more = {**groups[-1], "name": f"demo_{len(groups)}", "host_policy": f"frontend-{len(groups)}"}
    wanted = groups[:-1] if fault.pick % 2 else [*groups, more]
    # Anything that differs besides groups: the server then starts a second set, and ends the first when it is done.
    _load(replica, {**config, "instance_group": wanted, "metric_tags": {"frontends": str(len(wanted))}})
    time.sleep(fault.hold_s)
    _load(replica, config)


def _load(replica: Replica, config: dict[str, Any]) -> None:
    """Again where a fault kills a frontend meanwhile: one that dies in its load fails that, as is promised."""
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    while True:
        kills = _kills(replica, ("frontend",))
        status, answer = replica.get("/v2/repository/models/demo/load", body, 60.0)
        if status == 200:
            return
        if _kills(replica, ("frontend",)) == kills:
            raise Problem(f"a load with another number of frontends fails: {status} {answer[:300]!r}")


def _post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    return connection


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_CUT = frozenset(_TORN)
_WAY = frozenset({"unavailable", "broken"})

KINDS: dict[str, Kind] = {
    # An engine's death costs time and nothing else.
    "kill-engine": Kind(kill("engine"), Shape(weight=3, hold_s=(0, 1), times=(1, 3))),
    "stop-engine": Kind(stop("engine"), Shape(weight=2, hold_s=(0.5, 8))),
    # 2.51 never ends a request that a dead stub held; the shim does.
    "kill-frontend": Kind(kill("frontend"), Shape(hold_s=(0, 1), times=(1, 2)), _CUT | {"lost"}, _WAY, queues=True),
    "kill-frontends": Kind(
        kill("frontend", everyone=True), Shape(hold_s=(0, 1), times=(1, 2)), _CUT | {"lost"}, _WAY, queues=True
    ),
    "stop-frontend": Kind(stop("frontend"), Shape(hold_s=_STUB_STOPS), stops=True),
    "kill-tokenizer": Kind(kill("tokenizer"), Shape(hold_s=(0, 1), times=(1, 2)), shim=_WAY),
    "stop-tokenizer": Kind(stop("tokenizer"), Shape(hold_s=_STUB_STOPS), stops=True),
    # A chat whose rendering process dies is rendered again.
    "kill-renderer": Kind(kill("renderer", everyone=True)),
    "kill-worker": Kind(kill("worker"), Shape(hold_s=(0, 1), times=(1, 2)), shim=_WAY),
    "stop-worker": Kind(stop("worker"), Shape(hold_s=(0.5, 3)), stops=True),
    "stop-server": Kind(stop("server"), Shape(hold_s=(0.5, 3)), shim=_WAY, stops=True),
    "stop-serve": Kind(stop("serve"), Shape(hold_s=(0.5, 3))),
    "kill-server": Kind(end("server", signal.SIGKILL), Shape(ends=True), _CUT, _WAY),
    "kill-serve": Kind(end("serve", signal.SIGKILL), Shape(ends=True), _CUT, _WAY),
    "term-serve": Kind(end("serve", signal.SIGTERM), Shape(ends=True), _CUT, _WAY),
    "remove-run-folder": Kind(remove_run_folder, Shape(), _WAY, _WAY),
    "fill-disk": Kind(fill_disk, Shape(hold_s=(0.5, 3)), _WAY, _WAY),
    "starve-descriptors": Kind(starve_descriptors, Shape(hold_s=(0.5, 3)), _WAY, _WAY),
    "starve-memory": Kind(starve_memory, Shape(hold_s=(0.5, 3)), _WAY, _WAY),
    "slow-readers": Kind(read_slowly, Shape(hold_s=(2, 6))),
    "half-open": Kind(half_open, Shape(hold_s=(1, 6))),
    "hostile": Kind(send_hostile, Shape(weight=4)),
    "load-unload": Kind(load_and_unload, Shape(hold_s=(0, 2))),
    # By name alone, for the server kills it; the same as kill-frontend then.
    "hang-frontend": Kind(
        stop("frontend"), Shape(weight=0, hold_s=(1, 3)), _CUT | {"lost"}, _WAY, stops=True, queues=True
    ),
    # By name alone: only a fleet that was made for it has clocks that can be set (test_clock.py).
    "jump-clock": Kind(jump_clock, Shape(weight=0, hold_s=(0.5, 3))),
    "scale": Kind(scale, Shape(hold_s=(0, 2))),
}
# By name too, for schedules that are kept.
KINDS |= {f"hostile-{name}": Kind(hostile_named(name), Shape(weight=0)) for name in hostile.BODIES}
