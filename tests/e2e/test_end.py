"""However `nereid serve` ends, all that it started ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from engine.serving.launch import guard, serve_loop
from engine.serving.link.process_watch import start_time
from tests.e2e.harness import Call, free_ports, listens, tokens_of, wait_until

EXIT_TIMEOUT_S = 2
UNLOADING_EXIT_TIMEOUT_S = 12  # half of it is for unloading
LONG_EXIT_TIMEOUT_S = 60  # in which a busy machine makes all of a stream
FIELDS = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}


def start(models: Path, log: Path, ports: list[int], exit_timeout_s: int = EXIT_TIMEOUT_S) -> subprocess.Popen[bytes]:
    http, grpc, metrics = ports
    words = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    words += ["--exit-timeout-secs", exit_timeout_s, "--model-repository", models, "--model", "demo"]
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "engine.serving.launch.cli", "serve", "--host", "127.0.0.1", *map(str, words)],
            stdout=file,
            stderr=subprocess.STDOUT,
        )


class Serve:
    """A `nereid serve` of the demo model, and what it started."""

    def __init__(self, models: Path, log: Path, exit_timeout_s: int) -> None:
        self.log = log
        self.ports = free_ports(3)
        http, grpc, _ = self.ports
        self.grpc = f"127.0.0.1:{grpc}"
        self.process = start(models, log, self.ports, exit_timeout_s)
        try:
            wait_until(lambda: serve_loop.is_ready(http), f"it is ready: {log.read_text()[-2000:]}")
        except AssertionError:
            self.process.terminate()
            raise
        self.started = {pid: start_time(pid) for pid in guard.descendants(self.process.pid)}
        (self.server,) = (pid for pid in self.started if "tritonserver\0" in _command(pid))
        self.regions = guard.regions(self.server) or set()

    def living(self) -> list[str]:
        return [_command(pid) for pid, began in self.started.items() if began is not None and start_time(pid) == began]

    def stubs(self) -> list[int]:
        return _stubs(self.server)

    def wait_gone(self, seconds: float) -> None:
        """Processes, ports and shared memory."""
        wait_until(lambda: not self.living(), f"nothing is left of {self.living()}", seconds)
        assert not [port for port in self.ports if listens(port)]
        assert self.regions
        wait_until(lambda: not left(self.regions), "its shared memory is removed", seconds)

    def wipe(self) -> None:
        for pid, began in {**self.started, self.process.pid: None}.items():
            if began is not None and start_time(pid) == began:
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(models: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Serve]:
    running = Serve(models, tmp_path / "log", getattr(request, "param", EXIT_TIMEOUT_S))
    try:
        yield running
    finally:
        running.wipe()


@pytest.mark.parametrize("serve", [LONG_EXIT_TIMEOUT_S], indirect=True, ids=[""])
def test_kill_9_of_serve_ends_all_after_the_streams_in_flight(serve: Serve) -> None:
    call = Call(serve, text_input="A server", stream=True, sampling_parameters=json.dumps(FIELDS))  # type: ignore[arg-type]
    first = call.next()
    serve.process.kill()
    assert len(tokens_of([first, *call.all()])) == FIELDS["max_tokens"]
    serve.process.wait()
    serve.wait_gone(LONG_EXIT_TIMEOUT_S + 30)
    assert "nereid serve has died: the server is told to stop" in serve.log.read_text()


def test_an_idle_stream_does_not_hold_the_server_after_sigterm(serve: Serve) -> None:
    """Nor when all processes get the signal, as from systemd."""
    with InferenceServerClient(serve.grpc) as client:
        client.start_stream(lambda result, error: None)
        assert client.is_server_live()
        for pid in (serve.process.pid, *serve.started):
            os.kill(pid, signal.SIGTERM)
        status = serve.process.wait(
            EXIT_TIMEOUT_S + 30
        )  # by the log after the exit timeout and 2 s; the machine may be busy
        serve.wait_gone(10)
    assert status == 0
    assert f"the server has not ended {EXIT_TIMEOUT_S + 2} s after it was told to" in serve.log.read_text()


def test_an_idle_connection_holds_the_server_until_the_exit_timeout_and_no_longer(serve: Serve) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.ports[0]}") as client:
        assert client.get("/v2/health/ready").status_code == 200
        serve.process.terminate()
        assert serve.process.wait(EXIT_TIMEOUT_S + 30) == 0
    serve.wait_gone(10)
    assert "warning: clients held connections open until the exit timeout" in serve.log.read_text()


@pytest.mark.parametrize("serve", [UNLOADING_EXIT_TIMEOUT_S], indirect=True, ids=[""])
def test_streams_that_do_not_end_in_time_are_told_so_before_the_server_ends_well(serve: Serve) -> None:
    """tritonserver 2.51 crashes at its exit timeout when streams are open."""
    call = Call(serve, text_input="A server", stream=True, sampling_parameters=json.dumps(FIELDS))  # type: ignore[arg-type]
    call.next()
    (engine,) = (pid for pid in serve.started if "engine.serving.host" in _command(pid))
    os.kill(engine, signal.SIGSTOP)
    serve.process.terminate()
    with pytest.raises(InferenceServerException, match="its exit timeout is nearly over"):
        call.all()
    os.kill(engine, signal.SIGCONT)
    assert serve.process.wait(UNLOADING_EXIT_TIMEOUT_S + 30) == 0
    serve.wait_gone(10)


def test_regions_of_killed_instances_and_of_a_killed_server_are_removed(serve: Serve) -> None:
    Call(serve, text_input="A server", stream=True, sampling_parameters=json.dumps(FIELDS)).all()  # type: ignore[arg-type]
    stub = serve.stubs()[0]
    region = _command(stub).split("\0")[2].strip("/")
    assert region in left(serve.regions)
    os.kill(stub, signal.SIGKILL)
    wait_until(lambda: region not in left(serve.regions), "the region of the killed instance is removed")
    wait_until(lambda: "its instances are complete again" in serve.log.read_text(), "another took its place")
    assert left(serve.regions) == serve.regions - {region}, "those of the living stay"
    os.kill(serve.server, signal.SIGKILL)
    serve.process.wait(60)
    serve.wait_gone(10)


def test_an_instance_that_dies_in_the_first_load_ends_it_with_a_sentence(models: Path, tmp_path: Path) -> None:
    """Killed before its first word: tritonserver 2.51 waits for that without a limit."""
    log = tmp_path / "log"
    process = start(models, log, free_ports(3))
    stubs: list[int] = []
    try:
        wait_until(lambda: stubs.extend(_stubs(process.pid)) or stubs, "a frontend is started")
        os.kill(stubs[0], signal.SIGKILL)
        assert process.wait(60) != 0
    finally:
        process.terminate()
    assert "error: model demo: Stub process" in log.read_text()


def left(regions: set[str]) -> set[str]:
    return {name for name in regions if (guard.SHARED_MEMORY / name).exists()}


def _stubs(server: int) -> list[int]:
    return [pid for pid in guard.descendants(server) if "python_backend_stub\0/" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
