"""Instances whose stub has died are replaced through the repository API, and nothing else is disturbed.

This process is the server: stubs are its children, and the repository here does what 2.51 does when it loads a
configuration with other instance groups in place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.serving.launch.replacement import Config, Replacement, Repository, RepositoryError, names, read_stub


class Server(Repository):
    """One model of the groups g0, g1, …; a load keeps the instances of groups that are equal. count: instances a
    group."""

    def __init__(self, folder: Path, groups: int, count: int = 1) -> None:
        (folder / "m" / "1").mkdir(parents=True)
        self._model_py = folder / "m" / "1" / "model.py"
        self._model_py.write_text("read forever\n")
        groups_ = [{"name": f"g{i}", "count": count, "host_policy": f"h{i}"} for i in range(groups)]
        self.current: Config | None = {"name": "m", "instance_group": groups_}
        self.stubs: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.older: dict[str, list[subprocess.Popen[bytes]]] = {}  # of the set before, that still live
        self.loads: list[Config] = []
        self.failures = 0
        self.silences = 0  # calls of `config` that are not answered, once a load was
        self.newborn: list[set[str]] = []  # groups whose new stubs die as they appear, a set for each of the next loads
        self.seen: Callable[[], set[int]] = set  # pids of stubs that are watched
        self._regions = itertools.count()
        self._arrange(groups_)

    def state(self, model: str) -> str:
        if self.loads and self.silences > 0:
            self.silences -= 1
            raise RepositoryError("timed out")
        return "UNAVAILABLE" if self.current is None else "READY"

    def config(self, model: str) -> Config | None:
        return self.current

    def load(self, model: str, config: Config) -> None:
        self.loads.append(config)
        if self.failures > 0 and len(config["instance_group"]) > 1:
            self.failures -= 1
            raise RepositoryError("the new stub is not healthy")
        assert self.current is not None
        kept = [group for group in self.current["instance_group"] if group in config["instance_group"]]
        for name in names(self.current["instance_group"]) - names(kept):
            for stub in self.stubs.pop(name):
                end(stub)
        self.current = config
        self._arrange(config["instance_group"])
        for name in (self.newborn.pop(0) if self.newborn else set()) & self.stubs.keys():
            for stub in self.stubs[name]:
                kill(stub)
                wait_until(lambda stub=stub: not Path(f"/proc/{stub.pid}/cmdline").read_bytes())  # type: ignore[misc]

    def _arrange(self, groups: list[Config]) -> None:
        for group in groups:
            if group["name"] not in self.stubs:
                self.stubs[group["name"]] = [self._stub(f"{group['name']}_{i}") for i in range(group["count"])]

    def _stub(self, instance: str) -> subprocess.Popen[bytes]:
        """A shell under a stub's command line, which waits for a line that never comes."""
        region = f"no-region-{next(self._regions)}"
        words = ["/x/triton_python_backend_stub", str(self._model_py), region, *"szpb0", instance, "DEFAULT"]
        stub = subprocess.Popen(words, executable="/bin/sh", stdin=subprocess.PIPE)
        # A load returns when its stub is up. The kernel shows the command line a moment after exec has begun.
        wait_until(lambda: read_stub(stub.pid) is not None)
        return stub

    def start_second_set(self) -> None:
        """As a load of other settings does: of the same names, while the first set lives on."""
        time.sleep(0.05)  # the kernel counts starts in steps of 10 ms
        self.older, self.stubs = self.stubs, {}
        assert self.current is not None
        self._arrange(self.current["instance_group"])
        wait_until(lambda: {stub.pid for stubs in self.stubs.values() for stub in stubs} <= self.seen())

    def all_stubs(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        return itertools.chain(self.stubs.values(), self.older.values())

    def groups_of_loads(self) -> list[list[str]]:
        return [sorted(names(config["instance_group"])) for config in self.loads]

    def whole(self) -> bool:
        return all(stub.poll() is None for stubs in self.stubs.values() for stub in stubs) and len(self.stubs) > 1


def end(stub: subprocess.Popen[bytes]) -> None:
    """End a stub and collect it, as the server does."""
    stub.kill()
    stub.wait()
    if stub.stdin is not None:
        stub.stdin.close()


@pytest.fixture
def tend(tmp_path: Path) -> Iterator[Callable[..., tuple[Server, list[str]]]]:
    """Makes servers whose instances are replaced, with what is said about them."""
    with contextlib.ExitStack() as stack:

        def make(groups: int, count: int = 1) -> tuple[Server, list[str]]:
            server = Server(tmp_path, groups, count)
            stack.callback(lambda: [end(stub) for stubs in server.all_stubs() for stub in stubs])
            sentences: list[str] = []
            replacement = Replacement(os.getpid(), server, sentences.append)
            server.seen = lambda: set(replacement._stubs)
            replacement.start()
            stack.callback(replacement._thread.join)
            stack.callback(replacement.close)
            wait_until(lambda: len(replacement._stubs) == groups * count)
            return server, sentences

        yield make


def kill(stub: subprocess.Popen[bytes]) -> None:
    os.kill(stub.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_dead_ones_group_goes_and_comes_back_and_the_others_stay(
    tend: Callable[..., tuple[Server, list[str]]],
) -> None:
    server, sentences = tend(3)
    before = {name: stubs[0].pid for name, stubs in server.stubs.items()}
    first = server.current
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert server.groups_of_loads() == [["g0", "g2"], ["g0", "g1", "g2"]]
    assert server.current == first
    after = {name: stubs[0].pid for name, stubs in server.stubs.items()}
    assert {name for name in after if after[name] != before[name]} == {"g1"}
    assert "m: instance g1_0" in sentences[0]


def test_when_all_are_dead_all_are_made_anew_at_once(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    server, sentences = tend(1, count=2)
    for stub in server.stubs["g0"]:
        kill(stub)
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert [group["host_policy"] for group in server.loads[-1]["instance_group"]] == ["h0+1"]
    for stub in server.stubs["g0"]:
        kill(stub)
    wait_until(lambda: sum("complete" in sentence for sentence in sentences) == 2)
    assert [group["host_policy"] for group in server.loads[-1]["instance_group"]] == ["h0+2"]


@pytest.mark.parametrize(
    "newborn",
    [
        pytest.param([{"g0", "g1"}], marks=pytest.mark.slow),
        [{"g0", "g1"}, {"g0", "g1"}, {"g0", "g1"}],
        pytest.param([{"g0"}, {"g1"}], marks=pytest.mark.slow),
        [{"g0", "g1"}, {"g1"}],
    ],
)
def test_those_that_die_as_they_appear_are_replaced_again(
    newborn: list[set[str]], tend: Callable[..., tuple[Server, list[str]]]
) -> None:
    """To load a configuration that the server has starts nothing, so no two renewals are equal."""
    server, sentences = tend(2)
    server.newborn = newborn
    for stubs in server.stubs.values():
        kill(stubs[0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert server.newborn == []
    assert server.whole()


def test_one_of_a_group_of_several_cannot_be_replaced_alone_and_is_named(
    tend: Callable[..., tuple[Server, list[str]]],
) -> None:
    server, sentences = tend(2, count=2)
    kill(server.stubs["g1"][0])
    wait_until(lambda: bool(sentences))
    assert "instance g1_0 died and cannot be replaced" in sentences[0]
    assert server.loads == []


def test_one_whose_place_is_taken_already_is_not_said_to_be_lost(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    """Of two deaths in a row the first is looked into when the second's successor lives."""
    server, sentences = tend(2)
    state, states = server.state, 0

    def take_its_place(model: str) -> str:
        nonlocal states
        states += 1
        if states == 1:
            server.stubs["g1"] = [server._stub("g1_0")]
        return state(model)

    server.state = take_its_place  # type: ignore[method-assign]
    first = server.stubs["g1"][0].pid
    kill(server.stubs["g1"][0])
    wait_until(lambda: bool(sentences))
    assert sentences == [f"m: instance g1_0 (pid {first}) died; another has taken its place"]
    assert server.loads == []


def test_one_whose_namesake_of_an_older_set_still_lives_is_replaced(
    tend: Callable[..., tuple[Server, list[str]]],
) -> None:
    """A load of other settings starts a second set of the same names; the first lives on while its streams do."""
    server, sentences = tend(2)
    server.start_second_set()
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert server.groups_of_loads() == [["g0"], ["g0", "g1"]]
    assert server.whole()


def test_one_of_an_older_set_is_not_replaced(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    server, sentences = tend(2)
    server.start_second_set()
    pid = server.older["g1"][0].pid
    kill(server.older["g1"][0])
    wait_until(lambda: bool(sentences))
    assert sentences == [f"m: instance g1_0 (pid {pid}) died; another has taken its place"]
    assert server.loads == []


def test_one_of_a_group_that_was_scaled_away_has_no_successor(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    """The server keeps a set of frontends for good, behind a load that replaces it, when one of it had died."""
    server, sentences = tend(3)
    assert server.current is not None
    server.current = {**server.current, "instance_group": server.current["instance_group"][:2]}
    pid = server.stubs["g2"][0].pid
    kill(server.stubs["g2"][0])
    wait_until(lambda: bool(sentences))
    assert sentences == [f"m: instance g2_0 (pid {pid}), of a set that was replaced, died"]
    assert server.loads == []


def test_what_the_server_ends_itself_is_not_replaced(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    server, sentences = tend(3)
    end(server.stubs.pop("g0")[0])
    server.current = None  # it is being unloaded
    kill(server.stubs["g1"][0])
    time.sleep(0.8)
    assert (server.loads, sentences) == ([], [])


def test_a_start_that_fails_is_tried_again_however_often(
    tend: Callable[..., tuple[Server, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serving.launch.replacement._BACKOFF_S", (0.0, 0.01, 0.02))
    monkeypatch.setattr("engine.serving.launch.replacement._LONG_S", 0.01)
    server, sentences = tend(2)
    server.failures = 15
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert server.groups_of_loads() == [["g0"], *[["g0", "g1"]] * 16]
    assert "m: instances died 12 times in a row; others are started in 0.02 s" in sentences


def test_a_death_while_others_are_started_is_not_waited_for(
    tend: Callable[..., tuple[Server, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load lasts as long as the new instances take, and the server waits for ever for one that has died: only who
    watches meanwhile can free it."""
    freed = threading.Event()
    monkeypatch.setattr(
        "engine.serving.launch.stub_rescue.release", lambda region, control: died.is_set() and freed.set()
    )
    died = threading.Event()
    server, sentences = tend(2)
    load = server.load

    def wait(model: str, config: Config) -> None:
        load(model, config)
        if len(config["instance_group"]) == 2 and not died.is_set():
            newborn = server.stubs["g1"][0]
            wait_until(lambda: newborn.pid in server.seen())
            died.set()
            kill(newborn)
            assert freed.wait(20)
            raise RepositoryError("Stub process 'g1_0' is not healthy")

    monkeypatch.setattr(server, "load", wait)
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert server.whole()


def test_a_first_word_is_not_counted_until_the_others_of_its_load_are_ready(
    tend: Callable[..., tuple[Server, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails as another of its instances becomes ready may end the server."""
    starting: set[str] = set()
    released = threading.Event()
    early: list[str] = []

    def release(region: str, control: int) -> bool:
        if region == dead:
            released.set()
            early.extend(starting)
        return False

    monkeypatch.setattr("engine.serving.launch.stub_rescue.starts", lambda region, control: region in starting)
    monkeypatch.setattr("engine.serving.launch.stub_rescue.release", release)
    server, sentences = tend(2)
    load, dead = server.load, ""

    def wait(model: str, config: Config) -> None:
        nonlocal dead
        if dead:
            load(model, config)
            return
        starting.update(("no-region-2", "no-region-3"))
        load(model, config)
        newborn = server.stubs["g1"][0]
        wait_until(lambda: newborn.pid in server.seen())
        kill(newborn)
        dead = "no-region-3"
        starting.remove(dead)
        wait_until(lambda: newborn.pid not in server.seen())
        starting.clear()
        assert released.wait(20)
        raise RepositoryError("Stub process 'g1_0' is not healthy")

    monkeypatch.setattr(server, "load", wait)
    for stubs in server.stubs.values():
        kill(stubs[0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert early == []
    assert server.whole()


def test_what_waits_for_a_model_is_refused_where_a_load_waits_for_its_dead_alone(
    tend: Callable[..., tuple[Server, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead instance that the server ends first works off all requests of the model, at a second each."""
    looks = threading.Semaphore(0)
    refused: list[str] = []
    refusing = threading.Event()

    def release(region: str, control: int) -> bool:
        looks.release()
        return True

    def refuse(region: str, control: int, sentence: str) -> None:
        refused.append(sentence)
        refusing.set()

    monkeypatch.setattr("engine.serving.launch.replacement._STUCK_S", 0.01)
    monkeypatch.setattr("engine.serving.launch.replacement._RELEASE_S", 0.01)
    monkeypatch.setattr("engine.serving.launch.stub_rescue.release", release)
    monkeypatch.setattr("engine.serving.launch.stub_rescue.refuse", refuse)
    server, sentences = tend(2)
    load, waits = server.load, 0

    def wait(model: str, config: Config) -> None:
        nonlocal waits
        waits += 1
        load(model, config)
        if waits > 1:
            return
        newborn = [stubs[0] for stubs in server.stubs.values()]
        wait_until(lambda: {stub.pid for stub in newborn} <= server.seen())
        refused.clear()  # of the moment before they appeared
        while looks.acquire(blocking=False):
            pass
        for _ in range(6):
            assert looks.acquire(timeout=20)
        assert refused == [], "others take the requests"
        refusing.clear()
        for stub in newborn:
            kill(stub)
        assert refusing.wait(20)

    monkeypatch.setattr(server, "load", wait)
    for stubs in server.stubs.values():
        kill(stubs[0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert set(refused) <= {"Stub process 'g0_0' is not healthy.", "Stub process 'g1_0' is not healthy."}
    assert server.whole()


def test_groups_that_somebody_else_changes_meanwhile_stay_changed(
    tend: Callable[..., tuple[Server, list[str]]],
) -> None:
    server, sentences = tend(2)
    server.failures = 1
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("not healthy" in sentence for sentence in sentences))
    assert server.current is not None
    groups = [server.current["instance_group"][0], {"name": "g7", "count": 1, "host_policy": "h7"}]
    server._arrange(groups)
    server.current = {**server.current, "instance_group": groups}
    time.sleep(2.0)
    assert server.groups_of_loads() == [["g0"], ["g0", "g1"]]


def test_a_server_that_does_not_answer_is_asked_again(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    server, sentences = tend(2)
    server.silences, server.failures = 1, 1
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("complete" in sentence for sentence in sentences))
    assert server.groups_of_loads() == [["g0"], ["g0", "g1"], ["g0", "g1"]]
    assert any("timed out" in sentence for sentence in sentences)


def test_another_configuration_is_left_alone(tend: Callable[..., tuple[Server, list[str]]]) -> None:
    """Somebody loads the model with other settings between a failed start and the next."""
    server, sentences = tend(2)
    server.failures = 1
    kill(server.stubs["g1"][0])
    wait_until(lambda: any("not healthy" in sentence for sentence in sentences))
    server.current = {**(server.current or {}), "parameters": {"stream_interval": "2"}}
    time.sleep(1.5)
    assert server.groups_of_loads() == [["g0"], ["g0", "g1"]]
