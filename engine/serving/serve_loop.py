"""Run the server in the foreground: progress bars while models load, then its log, a clean end on a signal."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from types import FrameType
from typing import IO

import zmq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.serving import launcher, messages

_LOOK_S = 0.25
_LINES_KEPT = 200


def serve(options: launcher.Options, console: Console) -> int:
    """Start the server, show how its models load, pass signals on, return its exit status.

    Raises LaunchError when there is no server to start.
    """
    folder = Path(tempfile.mkdtemp(prefix="nereid-serve-"))
    address = f"ipc://{folder}/progress"
    context = zmq.Context()
    bars = _Bars(context, address, console)
    try:
        process = launcher.start(
            options, progress=address, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        _pass_signals(process)
        log = _Log(process, console)
        bars.show(process, options.http_port)
        if process.poll() is None:
            _greet(options, console)
        status = process.wait()
        log.join()
        if status != 0:
            log.explain(console)
        return status
    finally:
        bars.close()
        context.term()
        shutil.rmtree(folder, ignore_errors=True)


def is_ready(http_port: int) -> bool:
    """Whether the server and all of its models answer ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class _Bars:
    """Progress bars fed by the engine processes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, console: Console) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._socket.bind(address)
        self._console = console

    def show(self, process: subprocess.Popen[str], http_port: int) -> None:
        """Show bars until the server answers ready or ends."""
        columns = (
            TextColumn("{task.fields[model]}"),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
        )
        looked = 0.0
        with Progress(*columns, console=self._console, transient=not self._console.is_terminal) as progress:
            tasks: dict[tuple[str, str], object] = {}
            while process.poll() is None:
                if self._socket.poll(int(_LOOK_S * 1000)):
                    self._update(progress, tasks, messages.decode_progress(self._socket.recv()))
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    if is_ready(http_port):
                        return

    def close(self) -> None:
        self._socket.close(linger=0)

    @staticmethod
    def _update(progress: Progress, tasks: dict[tuple[str, str], object], report: messages.Progress) -> None:
        key = (report.model, report.stage)
        total = report.total or None
        if key not in tasks:
            tasks[key] = progress.add_task(report.stage, total=total, model=report.model, unit=report.unit)
        progress.update(tasks[key], completed=report.done, total=total)  # type: ignore[arg-type]


class _Log:
    """Copies the server's output to the console, and keeps the last of it for an explanation."""

    def __init__(self, process: subprocess.Popen[str], console: Console) -> None:
        assert process.stdout is not None
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._thread = threading.Thread(target=self._copy, args=(process.stdout, console), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(timeout=5)

    def explain(self, console: Console) -> None:
        """Repeat why models did not load, as sentences."""
        for sentence in load_failures(self._lines):
            console.print(f"[red]error:[/] {sentence}", highlight=False)

    def _copy(self, stream: IO[str], console: Console) -> None:
        for line in stream:
            self._lines.append(line.rstrip("\n"))
            console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)


def load_failures(lines: deque[str]) -> list[str]:
    """The reasons in Triton's log lines `failed to load 'NAME' version 1: Internal: TritonModelException: ...`."""
    found = []
    for line in lines:
        _, mark, rest = line.partition("failed to load '")
        if mark:
            name, _, reason = rest.partition("'")
            sentence = reason.rpartition("TritonModelException: ")[2].partition("\\n\\nAt:")[0].rstrip('"')
            found.append(f"model {name}: {sentence.strip()}")
    return list(dict.fromkeys(found))


def _pass_signals(process: subprocess.Popen[str]) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, forward)
    signal.signal(signal.SIGTERM, forward)


def _greet(options: launcher.Options, console: Console) -> None:
    host = "localhost"
    console.print(
        f"ready: HTTP http://{host}:{options.http_port}  gRPC {host}:{options.grpc_port}  "
        f"metrics http://{host}:{options.metrics_port}/metrics  (Ctrl-C stops)"
    )
