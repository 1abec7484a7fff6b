"""A real tritonserver with two models, and the shim in front of it, for all tests of one worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.python.local_server import LocalServer, free_ports
from engine.demo import make as demo
from engine.serving.launch import repository
from tests.clients import scripted_checkpoint

DEMO = {"speculation.method": "prediction"}  # a request that predicts its answer is drafted for, and no other
SCRIPTED = {"max_model_len": "2048"}  # which is filled in less time than its checkpoint's 8,192


class Shim:
    """`python -m clients.openai` as a process of its own."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http") -> None:
        (port,) = free_ports(1)
        self.host = f"127.0.0.1:{port}"
        self.url = f"{scheme}://{self.host}"
        self._log = folder / f"shim-{port}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "clients.openai", "--port", str(port), "--health-interval", "0.3", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait(port)

    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def _wait(self, port: int) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the shim ended with {self.process.returncode}:\n{self.log()}")
            if "startup complete" in self.log():
                return
            time.sleep(0.05)
        raise AssertionError(f"the shim did not start:\n{self.log()}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """tritonserver with `demo` (seeded noise) and `scripted` (known answers)."""
    folder = tmp_path_factory.mktemp("server")
    models = folder / "models"
    demo.make(folder / "demo")
    scripted_checkpoint.make(folder / "scripted")
    for name in ("demo", "scripted"):
        settings = DEMO if name == "demo" else SCRIPTED
        repository.add(folder / name, name, models, settings=settings, tokenizer=True, ensemble=False, frontends=2)
    with LocalServer(models) as running:
        yield running


@pytest.fixture(scope="session")
def triton(server: LocalServer) -> str:
    """The server as --triton takes it."""
    return f"{server.grpc}:{server.metrics.rsplit(':', 1)[1]}"


@pytest.fixture(scope="session")
def shim(triton: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    running = Shim(tmp_path_factory.mktemp("shim"), "--triton", triton)
    yield running
    running.stop()


def gauges(server: LocalServer, model: str = "demo") -> dict[str, float]:
    """The engine's gauges of a model on :8002, without their prefix."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("vllm:") and f'model="{model}"' in line and "_bucket" not in line:
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0].removeprefix("vllm:")] = float(value)
    return found


def until(what: Callable[[], bool], seconds: float, message: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, message
        time.sleep(0.02)
