"""What `nereid serve` does with the log of its server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from engine.serving.launch.serve_loop import _Log
from engine.terminal import Console

# More than a pipe holds, with bytes that are no text.
TALK = "import sys; [sys.stdout.buffer.write(b'a line with \\xff and \\xc3\\xa9 in it\\n') for _ in range(5000)]"


def full() -> IO[str]:
    return open("/dev/full", "w")


def broken() -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def narrow() -> IO[str]:
    return open(os.devnull, "w", encoding="ascii")


@pytest.mark.parametrize("made", [full, broken, narrow])
def test_a_log_that_cannot_be_written_stops_no_server(made: Callable[[], IO[str]]) -> None:
    """It is read to its end, or the server would wait in a write for ever."""
    talks = subprocess.Popen([sys.executable, "-c", TALK], stdout=subprocess.PIPE, text=True, errors="replace")
    file = made()
    log = _Log(talks, Console(file=file, goes_on=True))
    try:
        assert talks.wait(20) == 0
        log.join()
    finally:
        talks.kill()
        with contextlib.suppress(OSError):  # of what it still holds
            file.close()


def test_a_server_that_a_signal_ends_is_explained(tmp_path: Path) -> None:
    """tritonserver 2.51 may die between the failure of an instance and that of its model."""
    lines = ['"loading: demo:1"', '"ERROR: Failed to create instance: it is not healthy."']
    script = f"import os; print(*{lines}, sep=chr(10), flush=True); os.kill(os.getpid(), 11)"
    dies = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, errors="replace")
    with (tmp_path / "log").open("w") as file:
        console = Console(file=file, goes_on=True)
        log = _Log(dies, console)
        status = dies.wait(20)
        log.join()
        log.explain(console, status)
    assert (tmp_path / "log").read_text().splitlines()[2:] == [
        "error: model demo: it is not healthy.",
        "error: tritonserver was ended by SIGSEGV",
    ]


def test_what_the_log_says_arrives(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        Console(file=file, goes_on=True).print("a line with é in it")
    assert (tmp_path / "log").read_text() == "a line with \\xe9 in it\n"
