"""The way between the first host and the others: who is taken in, what is refused, what ends the group."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, ParallelConfig
from engine.parallel import identity, remote_host
from engine.parallel.host_group import MAX_STRANGERS, Hosts, listen
from engine.parallel.host_link import Beat, Fault, Goodbye, Hello, Joined, Link, LinkError, Refused, Said, Welcome
from engine.parallel.placement import Placement, PlacementError
from engine.parallel.remote_host import HostError
from tests.e2e.harness import free_ports, wait_until

MAX_STEP = 1 << 24


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    return EngineConfig(model=str(tmp_path), parallel=ParallelConfig(tensor=2))


class First:
    """The first of two hosts."""

    def __init__(self, config: EngineConfig, meet_s: float = 60.0) -> None:
        (port,) = free_ports(1)
        self.placement = Placement(0, 2, 0, "127.0.0.1", port)
        self.faults: list[str] = []
        self.links: list[Link] = []
        self.hosts = Hosts(config, self.placement, 1234, lambda sentence, lasting: self.faults.append(sentence), meet_s)

    def connect(self) -> Link:
        self.links.append(Link(socket.create_connection(("127.0.0.1", self.placement.port), 10), MAX_STEP))
        return self.links[-1]

    def fault(self) -> str:
        wait_until(lambda: self.faults, "the group ends", 20)
        return self.faults[0]


@pytest.fixture
def first(config: EngineConfig) -> Iterator[First]:
    made = First(config)
    yield made
    made.hosts.close()


def hello() -> Hello:
    return Hello(1, 2, identity.code(), identity.packages())


def hear(link: Link, count: int = 1) -> list[Said | bytes]:
    """What comes, beats left out."""
    heard: list[Said | bytes] = []
    deadline = time.monotonic() + 20
    while len(heard) < count and not link.ended and time.monotonic() < deadline:
        if link.wait(0.1):
            heard += [said for said in link.receive() if not isinstance(said, Beat)]
    return heard


def ended(link: Link) -> bool:
    return hear(link) == [] and link.ended


def joined(first: First) -> Link:
    link = first.connect()
    link.say(hello())
    (welcome,) = hear(link)
    assert isinstance(welcome, Welcome)
    link.say(Joined())
    wait_until(lambda: first.hosts._links, "the host has joined", 10)
    return link


def test_a_host_is_told_the_settings_and_where_ranks_meet(first: First, config: EngineConfig) -> None:
    link = first.connect()
    link.say(hello())
    assert hear(link) == [Welcome(config, identity.model(config), 1234)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hosts": 3}, "its WORLD_SIZE is 3, and here it is 2"),
        ({"host": 0}, "its RANK is 0: others than the first are 1 to 1"),
        ({"host": 2}, "its RANK is 2"),
        ({"code": "other"}, "its files of Nereid differ"),
        ({"packages": {**identity.packages(), "torch": "1.0"}}, "it has torch 1.0 and the first host torch 2"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why(first: First, changes: dict[str, object], sentence: str) -> None:
    link = first.connect()
    link.say(msgspec.structs.replace(hello(), **changes))
    (answer,) = hear(link)
    assert isinstance(answer, Refused)
    assert answer.lasting
    assert answer.sentence.startswith(sentence)
    joined(first)
    assert first.faults == []


def test_a_second_host_of_a_number_may_come_again(first: First) -> None:
    joined(first)
    link = first.connect()
    link.say(hello())
    (answer,) = hear(link)
    assert answer == Refused("a host of that RANK is here already: give each process a RANK of its own", False)
    assert first.faults == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0\xff\xff\xff\xff",
        b"\1\1\0\0\0x",
        b"\0\1\0\0\0\xc1",
        b"\0\x0c\0\0\0\x81\xa4type\xa5hello",
    ],
)
def test_what_is_no_host_is_shut_out(first: First, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", first.placement.port), 10) as stranger:
        stranger.sendall(data)
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    joined(first)
    assert first.faults == []


@pytest.mark.parametrize("word", [Joined(), Beat(), Goodbye(), Fault("x")])
def test_a_stranger_says_hello_first(first: First, word: Said) -> None:
    link = first.connect()
    link.say(word)
    if not isinstance(word, Beat):
        assert ended(link)
    joined(first)
    assert first.faults == []


def test_connections_that_say_nothing_keep_no_host_out(first: First) -> None:
    strangers = [first.connect() for _ in range(3 * MAX_STRANGERS)]
    joined(first)
    assert len(first.hosts._guests) <= MAX_STRANGERS + 1
    for stranger in strangers:
        stranger.close()


def test_a_host_that_hangs_before_it_has_joined_gives_its_seat_up(config: EngineConfig) -> None:
    """It kept it for ten minutes, and whoever came in its place was refused."""
    first = First(msgspec.structs.replace(config, parallel=ParallelConfig(tensor=2, hang_timeout_s=1.0)))
    silent = first.connect()
    silent.say(hello())
    assert isinstance(hear(silent)[0], Welcome)
    assert ended(silent)
    beating = first.connect()
    beating.say(hello())
    assert isinstance(hear(beating)[0], Welcome)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        beating.say(Beat())
        time.sleep(0.2)
    beating.say(Joined())
    wait_until(lambda: first.hosts._links, "one that beats may take its time to join", 10)
    assert first.faults == []
    first.hosts.close()


def test_without_descriptors_hosts_wait_and_nothing_spins(first: First, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, tried = first.hosts._listener, threading.Event()

    class Exhausted:
        """The listener of a process that may open no file more."""

        count = 0

        def accept(self) -> tuple[socket.socket, object]:
            self.count += 1
            tried.set()
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return listener.fileno()

        def close(self) -> None:
            listener.close()

    exhausted = Exhausted()
    monkeypatch.setattr(first.hosts, "_listener", exhausted)
    waiting = first.connect()
    waiting.say(hello())
    assert tried.wait(10)
    time.sleep(0.3)
    assert exhausted.count < 10, "it was tried thousands of times"
    monkeypatch.setattr(first.hosts, "_listener", listener)
    assert isinstance(hear(waiting)[0], Welcome)


def test_a_host_that_goes_is_named(first: First) -> None:
    joined(first).close()
    assert first.fault().startswith("host 1 (127.0.0.1) has closed its connection")


def test_a_host_says_which_of_its_ranks_is_gone(first: First) -> None:
    link = joined(first)
    link.say(Fault("rank 1 (pid 7) was killed by SIGKILL"))
    assert first.fault() == "host 1 (127.0.0.1): rank 1 (pid 7) was killed by SIGKILL"
    assert hear(link) == [Fault("host 1 (127.0.0.1): rank 1 (pid 7) was killed by SIGKILL")]
    assert ended(link)


def test_hosts_hear_that_the_model_cannot_be_served(first: First) -> None:
    link = joined(first)
    first.hosts.give_up("it has one head", lasting=True)
    assert hear(link) == [Fault("it has one head", True)]
    assert ended(link)


def test_a_host_that_says_nothing_is_given_up(config: EngineConfig) -> None:
    first = First(msgspec.structs.replace(config, parallel=ParallelConfig(tensor=2, hang_timeout_s=0.5)))
    joined(first)
    assert first.fault().startswith("host 1 (127.0.0.1) has said nothing for")


def test_a_host_that_does_not_come_is_named(config: EngineConfig) -> None:
    first = First(config, 0.2)
    assert first.fault().startswith("host 1 of 2 has not come within 0 s: start `nereid rank` there, with MASTER_ADDR=")


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 2_000_000), min_size=1, max_size=6))
def test_steps_arrive_whole_and_in_order(sizes: list[int]) -> None:
    ours, theirs = pair()
    steps = [os.urandom(1) * size for size in sizes]
    sender = threading.Thread(target=lambda: [ours.send_step(step) for step in steps], daemon=True)
    sender.start()
    assert hear(theirs, len(steps)) == steps
    sender.join(10)
    ours.close()
    theirs.close()


def test_who_takes_no_steps_is_waited_for_until_the_link_ends() -> None:
    ours, _theirs = pair()
    sender = threading.Thread(target=lambda: [ours.send_step(bytes(MAX_STEP)) for _ in range(4)], daemon=True)
    sender.start()
    sender.join(0.3)
    assert sender.is_alive(), "nothing keeps what the other side does not take"
    ours.mention(Beat())  # which waits for nobody
    ours.close()
    sender.join(10)
    assert not sender.is_alive()


def test_a_step_beyond_the_bound_is_refused() -> None:
    ours, theirs = pair()
    threading.Thread(target=ours.send_step, args=(bytes(MAX_STEP + 1),), daemon=True).start()
    with pytest.raises(LinkError, match="one of 16777217 bytes"):
        hear(theirs)
    theirs.close()


SAID = st.binary(max_size=64) | st.just(msgspec.msgpack.encode(Beat())) | st.just(msgspec.msgpack.encode(hello()))
FRAMES = st.builds(
    lambda kind, data, off: bytes([kind]) + (len(data) + off).to_bytes(4, "little") + data,
    st.integers(0, 3),
    SAID,
    st.sampled_from([0, 0, 0, 1, 1 << 20]),
)


@settings(max_examples=150, deadline=None)
@given(data=st.lists(FRAMES | st.binary(max_size=12), max_size=6).map(b"".join))
def test_bytes_of_any_kind_are_messages_or_an_error(data: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        link = Link(server.accept()[0], 32)
    with theirs:
        theirs.sendall(data)
    heard: list[Said | bytes] = []
    with contextlib.suppress(LinkError):
        while not link.ended:
            heard += link.receive()
    assert all(isinstance(said, Beat | Hello) or (isinstance(said, bytes) and len(said) <= 32) for said in heard)
    link.close()


def pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return Link(ours), Link(theirs, MAX_STEP)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("192.0.2.1", r"cannot listen at MASTER_ADDR 192.0.2.1, port \d+ \(Cannot assign requested address\)"),
        ("nowhere.invalid", "MASTER_ADDR nowhere.invalid is no name that this host knows"),
    ],
)
def test_the_first_host_is_where_it_is_said_to_be(address: str, sentence: str) -> None:
    with pytest.raises(PlacementError, match=sentence):
        listen(Placement(0, 2, 0, address, *free_ports(1)), patience_s=0.0)


def test_a_name_that_is_loopback_on_the_first_host_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: found)
    with pytest.raises(PlacementError, match=r"MASTER_ADDR node-1 is 127\.0\.1\.1 on this host"):
        listen(Placement(0, 2, 0, "node-1", 0), patience_s=0.0)


def test_a_port_that_is_taken_is_named(first: First) -> None:
    with pytest.raises(PlacementError, match=f"port {first.placement.port} of 127.0.0.1 is taken: set MASTER_PORT"):
        listen(first.placement, patience_s=0.0)


def other(first: First) -> Placement:
    return Placement(1, 2, 0, "127.0.0.1", first.placement.port)


def test_a_first_host_that_is_not_there_is_looked_for_and_named() -> None:
    placement = Placement(1, 2, 0, "127.0.0.1", *free_ports(1))
    with pytest.raises(HostError, match=rf"not to be found at MASTER_ADDR 127.0.0.1, port {placement.port}, for 0 s"):
        remote_host.serve(placement, None, 0.1)


def test_another_service_is_no_first_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connected, _ = server.accept()
            connected.sendall(b"SSH-2.0-x\r\n" + bytes(9))
            connected.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HostError, match="no message of ranks"):
            remote_host.serve(Placement(1, 2, 0, "127.0.0.1", server.getsockname()[1]), None, 0.0)


def test_a_host_with_other_code_ends_with_the_sentence(first: First, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "code", lambda: "other")
    with pytest.raises(HostError, match="the first host refuses this one: its files of Nereid differ"):
        remote_host.serve(other(first))


def change(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[200_000] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (change, "is another than on the first host: copy the same to every host"),
        (lambda folder: (folder / "config.json").write_text('{"a": 1}'), "is another than on the first host"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is another than on the first host"),
        (lambda folder: (folder / "m.gguf").write_bytes(b"other"), "is another than on the first host"),
    ],
    ids=["weights", "config", "missing", "GGUF"],
)
def test_a_host_with_another_checkpoint_ends_with_the_sentence(
    first: First,
    config: EngineConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    edit: Callable[[Path], object],
    sentence: str,
) -> None:
    caplog.set_level(logging.WARNING)
    there = tmp_path / "there"
    there.mkdir()
    for name in ("config.json", "model.safetensors"):
        (there / name).write_bytes((Path(config.model) / name).read_bytes())
    edit(there)
    with pytest.raises(HostError, match=sentence):
        remote_host.serve(other(first), there)
    wait_until(lambda: "its model is not that of the first host" in caplog.text, "the first host says so too", 10)
    assert first.faults == []


def test_a_place_that_is_not_another_hosts_is_refused() -> None:
    with pytest.raises(PlacementError, match="WORLD_SIZE is not set, or 1"):
        remote_host.serve(Placement())
    with pytest.raises(PlacementError, match="RANK is 0, which runs the server"):
        remote_host.serve(Placement(0, 2))
