"""Run the server in the foreground: progress bars while models load, then its log, a clean end on a signal."""

from __future__ import annotations

import functools
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import IO

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine import env, heap, signals
from engine.serving.launch import catalog, guard, launcher
from engine.serving.launch.replacement import Replacement, Repository
from engine.serving.link import messages
from engine.terminal import Console

_LOOK_S = 0.25
_REPORT_BYTES = 1 << 16
_LINES_KEPT = 200
_LOAD_FAILURE = re.compile(r"failed to load '(?P<name>[^']+)' version \d+: (?:\w+ ?\w*: )?(?P<reason>.*?)\"?$")
_LOADING = re.compile(r"\"loading: (?P<name>\S+):\d+\"")
_LOADED = re.compile(r"successfully loaded '(?P<name>[^']+)'")
_INSTANCE_FAILURE = re.compile(r"Failed to create instance: (?P<reason>.*?)\"?$")

# What tritonserver says, some of it as an error, on a machine without a GPU, where all is well.
_NO_GPU_NOISE = (
    "CudaDriverHelper has not been initialized",
    "Unable to allocate pinned system memory",
    "failed to allocate pinned system memory",
    "unable to create stream for ensemble",
    "CUDA memory pool disabled",
    "Failed to initialize NVML",
)


def serve(options: launcher.Options, console: Console) -> int:
    """Start the server, show how its models load, pass signals on, return its exit status.

    console: one that goes on, for whoever stops to read a server's log stops the server. Raises LaunchError when there
    is no server to start.
    """
    temporary = env.temporary_folder()
    try:
        folder = Path(tempfile.mkdtemp(prefix="nereid-serve-", dir=temporary))
    except OSError as error:
        raise launcher.LaunchError(f"no folder can be made in {temporary} ({error.strerror}): set TMPDIR") from None
    address = f"{folder}/progress"
    bars = _Bars(address, console)
    try:
        process = launcher.start(
            options,
            progress=address,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            start_new_session=True,
        )
        guardian = guard.start(process.pid, options.exit_timeout_s)
        replacement = Replacement(
            process.pid,
            Repository(options.http_port, options.own_address),
            functools.partial(console.print, markup=False, highlight=False),
        )
        told = _pass_signals(process, guardian, replacement)
        log = _Log(process, console)
        if not options.models:
            _name_waiting(options.repository, console)
        replacement.start()  # an instance that dies in the first load would have the server wait for ever
        bars.show(process, options)
        if process.poll() is None:
            greet(options, console)
        heap.keep_trimmed()
        status = process.wait()
        replacement.close()
        guardian.wait()
        log.join()
        if told.is_set() and status in _HELD and log.timed_out(status):
            console.print(f"[yellow]warning:[/] {_HELD[status]}", highlight=False, soft_wrap=True)
            return 0
        if status != 0:
            log.explain(console, status)
        return status
    finally:
        bars.close()
        shutil.rmtree(folder, ignore_errors=True)


# How tritonserver ends at its exit timeout, and the guard after it: connections without a request hold it until then.
_HELD = {
    1: "clients held connections open until the exit timeout, so models were not unloaded",
    -signal.SIGKILL: "clients held connections open beyond the exit timeout, so the server was killed",
}


def _name_waiting(repository: Path, console: Console) -> None:
    waiting = [entry.name for entry in catalog.entries(repository) if entry.awaits is not None]
    if waiting:
        console.print(f"without a checkpoint, so not served: {', '.join(waiting)} (see {repository}/README.md)")


def is_ready(http_port: int, host: str = "127.0.0.1") -> bool:
    """Whether the server and all of its models answer ready."""
    try:
        with urllib.request.urlopen(f"http://{host}:{http_port}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class _Bars:
    """Progress bars fed by the engine processes."""

    def __init__(self, address: str, console: Console) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._console = console

    def show(self, process: subprocess.Popen[str], options: launcher.Options) -> None:
        """Show bars until the server answers ready or ends."""
        columns = (
            TextColumn("{task.fields[model]}"),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
        )
        looked = 0.0
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            tasks: dict[str, tuple[str, TaskID]] = {}
            while process.poll() is None:
                if select.select([self._socket], [], [], _LOOK_S)[0]:
                    self._update(progress, tasks, messages.decode_progress(self._socket.recv(_REPORT_BYTES)))
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    if is_ready(options.http_port, options.own_address):
                        return

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def _update(progress: Progress, tasks: dict[str, tuple[str, TaskID]], report: messages.Progress) -> None:
        """Move the bar of a model's current stage; a new stage ends the one before."""
        stage, task = tasks.get(report.model, ("", TaskID(-1)))
        if stage != report.stage:
            if stage:
                progress.update(task, total=1, completed=1, amount="done")
            if report.stage == messages.LOADED:
                tasks.pop(report.model, None)
                return
            if not progress.console.is_terminal:  # a log file: a line a stage instead of a bar
                progress.console.print(f"{report.model}: {report.stage}")
            task = progress.add_task(report.stage, total=None, model=report.model, amount="")
            tasks[report.model] = (report.stage, task)
        progress.update(task, completed=report.done, total=report.total or None, amount=amount(report))


def amount(report: messages.Progress) -> str:
    """How far a stage is, for people."""
    if not report.total:
        return ""
    if report.unit == "bytes":
        return f"{report.done / 2**20:,.0f} of {report.total / 2**20:,.0f} MiB"
    return f"{report.done} of {report.total} {report.unit}".rstrip()


class _Log:
    """Copies the server's output to the console, and keeps the last of it for an explanation."""

    def __init__(self, process: subprocess.Popen[str], console: Console) -> None:
        assert process.stdout is not None
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._thread = threading.Thread(target=self._copy, args=(process.stdout, console), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(timeout=5)

    def timed_out(self, status: int) -> bool:
        """Whether the server ended with `status` because its exit timeout had passed."""
        return status == -signal.SIGKILL or any("Exit timeout expired" in line for line in self._lines.copy())

    def explain(self, console: Console, status: int) -> None:
        """Repeat why models did not load, as sentences, and what signal ended the server, if one did."""
        sentences = load_failures(self._lines.copy())
        if status < 0:
            sentences.append(f"tritonserver was ended by {signals.name(-status)}")
        for sentence in sentences:
            console.print(f"[red]error:[/] {escape(sentence)}", highlight=False)

    def _copy(self, stream: IO[str], console: Console) -> None:
        for line in stream:
            self._lines.append(line.rstrip("\n"))
            if not launcher.has_gpu() and any(mark in line for mark in _NO_GPU_NOISE):
                continue
            console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)


def load_failures(lines: Iterable[str]) -> list[str]:
    """The reasons in Triton's log lines `failed to load 'NAME' version 1: Internal: TritonModelException: ...`.

    Where the server died before that line, they are in those of the instances, which name no model: it is one of those
    that were being loaded.
    """
    told: list[tuple[str, str]] = []  # models and reasons
    untold: list[str] = []
    loading: dict[str, None] = {}
    for line in lines:
        if match := _LOADING.search(line):
            loading[match["name"]] = None
        elif match := _LOADED.search(line):
            loading.pop(match["name"], None)
        elif match := _INSTANCE_FAILURE.search(line):
            untold.append(_reason(match))
        elif match := _LOAD_FAILURE.search(line):
            loading.pop(match["name"], None)
            told.append((match["name"], _reason(match)))
    reasons = {reason for _, reason in told}
    if loading:
        told += [(" or ".join(loading), reason) for reason in untold if reason not in reasons]
    return [f"model {name}: {reason}" for name, reason in dict.fromkeys(told)]


def _reason(match: re.Match[str]) -> str:
    return match["reason"].rpartition("TritonModelException: ")[2].partition("\\n\\nAt:")[0].strip()


def _pass_signals(
    process: subprocess.Popen[str], guardian: subprocess.Popen[bytes], replacement: Replacement
) -> threading.Event:
    """Gives what is set when the server has been told to stop."""
    told = threading.Event()

    def forward(number: int, frame: FrameType | None) -> None:
        told.set()
        replacement.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            guard.tell(guardian)

    signal.signal(signal.SIGINT, forward)
    signal.signal(signal.SIGTERM, forward)
    return told


def greet(options: launcher.Options, console: Console) -> None:
    """Say where the server answers, in one line."""
    host = "localhost" if options.own_address == "127.0.0.1" else options.host
    metrics = f"metrics http://{host}:{options.metrics_port}/metrics  " if options.metrics_port else ""
    console.print(
        f"ready: HTTP http://{host}:{options.http_port}  gRPC {host}:{options.grpc_port}  {metrics}(Ctrl-C stops)",
        soft_wrap=True,
    )
