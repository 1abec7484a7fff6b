"""A server of one's own for a while: `nereid serve` on free ports, stopped at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_LOOK_S = 0.1


class ServerFailed(Exception):
    """The server ended or did not get ready; the message holds the end of its log."""


class LocalServer:
    """Context manager around `nereid serve`. http, grpc, metrics: its addresses, host:port. flags: more of them.
    variables: of its environment, beside this process's."""

    def __init__(
        self,
        repository: Path = Path("model_repository"),
        ready_s: float = 180.0,
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._repository = repository
        self._ready_s = ready_s
        self._flags = flags
        self._variables = variables or {}
        ports = free_ports(3)
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self._ports = ports
        self._folder = tempfile.TemporaryDirectory(prefix="nereid-server-")
        self.log_file = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalServer:
        http, grpc, metrics = map(str, self._ports)
        command = [
            sys.executable,
            "-m",
            "engine.serving.launch.cli",
            "serve",
            "--model-repository",
            str(self._repository),
        ]
        command += ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics, *self._flags]
        with self.log_file.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._variables},
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def log(self) -> str:
        """What the server has written so far."""
        return self.log_file.read_text(errors="replace")

    def stop(self) -> int:
        """End the server in good order and return its exit status; kill what does not end within a minute."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process.returncode

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + self._ready_s
        while time.monotonic() < end:
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with status {process.returncode}:\n{self._tail()}")
            if _answers(f"http://{self.http}/v2/health/ready"):
                return
            time.sleep(_LOOK_S)
        raise ServerFailed(f"the server was not ready after {self._ready_s:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-40:])


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
