"""A model on two "hosts" on loopback: a real server on the first, ranks on both, started as launchers do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import env
from engine.serving.launch import repository
from engine.serving.link.process_watch import parent, start_time
from tests.e2e.conftest import SETTINGS
from tests.e2e.harness import Call, Server, free_ports, tokens_of, wait_until
from tests.e2e.test_recovery import long_request
from tests.e2e.test_speculation import ASKED, SPECULATION, said

STREAMS, FEW = 6, 40
# torchrun imports torch before it starts anything, and ranks after.
READY_S = 120.0
BIN = Path(sys.executable).parent
# Of a host: what stands before `nereid`, and variables.
Launcher = Callable[[int, int], tuple[list[str], dict[str, str]]]


def torchrun(host: int, port: int) -> tuple[list[str], dict[str, str]]:
    where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    shape = ["--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1"]
    return [str(BIN / "torchrun"), *where, *shape, "--no-python", "--"], {}


def pods(host: int, port: int) -> tuple[list[str], dict[str, str]]:
    """As LeaderWorkerSet starts them."""
    group = {"LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(host)}
    return [], {**group, "MASTER_PORT": str(port)}


class Hosts(Server):
    """The server of the first host, and what the second one runs."""

    def __init__(
        self, models: Path, model: str, folder: Path, launcher: Launcher, second: tuple[str, ...] = ()
    ) -> None:
        """second: the arguments of `nereid` on the second host; none for those of the first."""
        self.http_port, self.grpc_port, self.metrics_port, self.master_port = free_ports(4)
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.log, self.other_log = folder / "first", folder / "second"
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        first = ["serve", "--model-repository", str(models), "--model", model, "--host", "127.0.0.1"]
        first += [f"--{name}-port={port}" for name, port in ports.items()]
        self._launcher, self._second = launcher, second or tuple(first)
        self.process = self._launch(0, self.log, first)
        self.start_other()

    def start_other(self) -> None:
        self.other = self._launch(1, self.other_log, self._second)

    def _launch(self, host: int, log: Path, arguments: list[str] | tuple[str, ...]) -> subprocess.Popen[str]:
        before, variables = self._launcher(host, self.master_port)
        command = [*before, str(BIN / "nereid"), *arguments]
        with log.open("a") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, text=True, env=env.inherited(**variables)
            )

    def stop(self) -> int:
        try:
            return super().stop()
        finally:
            self.other.terminate()
            self.other.wait(60)

    def first_rank(self) -> int:
        """The engine's process."""
        (pid,) = _running(b"engine.serving.host", self.process.pid)
        return pid

    def ranks(self) -> list[int]:
        """The processes of the second host's ranks."""
        return _running(b"engine.parallel.worker", self.other.pid)


def _running(module: bytes, ancestor: int) -> list[int]:
    """Processes of a Python module below another process, however deep."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            named = module in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        pid: int | None = int(entry.name)
        if named and start_time(int(entry.name)) is not None:
            while pid and pid != ancestor:
                pid = parent(pid)
            found += [int(entry.name)] if pid else []
    return found


def write(models: Path, checkpoint: Path, name: str, size: int) -> None:
    settings = {**SETTINGS, **SPECULATION, "parallel.tensor": str(size), "parallel.hang_timeout_s": "5"}
    repository.write_llm(models, name, {"model": str(checkpoint), **settings})


@pytest.fixture(scope="module")
def hosts(models: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The same command on both."""
    write(models, checkpoint, "spread", 2)
    running = Hosts(models, "spread", tmp_path_factory.mktemp("hosts"), torchrun)
    try:
        running.wait_ready(READY_S)
        yield running
    finally:
        running.stop()


def streams(server: Server, model: str) -> list[Call]:
    return [Call(server, **long_request(seed, FEW), model=model) for seed in range(STREAMS)]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """Of the same streams, by one process."""
    return [tokens_of(call.all()) for call in streams(server, "demo")]


def test_two_hosts_say_what_one_process_says(hosts: Hosts, server: Server, expected: list[list[int]]) -> None:
    assert [tokens_of(call.all()) for call in streams(hosts, "spread")] == expected
    for fields in ASKED:
        assert said(hosts, "spread", fields) == said(server, "demo", fields)


@pytest.mark.parametrize(
    ("host", "number"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        (0, signal.SIGKILL),
    ],
)
def test_streams_survive_the_end_of_either_hosts_rank(
    hosts: Hosts, expected: list[list[int]], host: int, number: signal.Signals
) -> None:
    """None of their tokens is lost, and none comes twice; each host starts its rank again."""
    old = [hosts.first_rank(), *hosts.ranks()]
    calls = streams(hosts, "spread")
    firsts = [call.next() for call in calls]
    os.kill(old[host], number)
    got = [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)]
    assert got == expected
    wait_until(lambda: all(start_time(pid) is None for pid in old), "both old ranks are gone")
    assert not {hosts.first_rank(), *hosts.ranks()} & set(old)
    if host == 1:
        assert f"host 1 (127.0.0.1): rank 1 (pid {old[1]})" in hosts.log.read_text()
    assert hosts.other.poll() is None


def test_the_other_host_ends_with_the_server(hosts: Hosts) -> None:
    """The last of this server's tests."""
    Server.stop(hosts)
    assert hosts.other.wait(60) == 0
    assert "the engine has ended, and with it the ranks of this host" in hosts.other_log.read_text()
    assert "ended with exit status" not in hosts.other_log.read_text() + hosts.log.read_text()


@pytest.mark.slow
def test_a_host_that_is_started_again_takes_its_place(
    models: Path, checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Two ranks on each of two pods, each with a copy of the checkpoint; what holds those of the second is killed."""
    write(models, checkpoint, "wide", 4)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    running = Hosts(models, "wide", tmp_path, pods, ("rank", "--checkpoint", str(copy)))
    try:
        running.wait_ready(READY_S)
        old = running.ranks()
        assert len(old) == 2
        calls = streams(running, "wide")
        firsts = [call.next() for call in calls]
        running.other.kill()
        running.other.wait(60)
        wait_until(lambda: all(start_time(pid) is None for pid in old), "its ranks end with it")
        running.start_other()
        got = [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)]
        assert got == expected
        assert "host 1 (127.0.0.1) has closed its connection" in running.log.read_text()
        assert len(running.ranks()) == 2
    finally:
        running.stop()
