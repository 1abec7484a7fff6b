"""A stub ends with the server that its command line names, whoever its parent is by then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROGRAM = """
import time
from engine.serving.link.process_watch import die_with, server_pid
print(server_pid(), flush=True)
die_with(server_pid())
time.sleep(60)
"""
_ENDED_S = 20.0


def stub(*names: str) -> subprocess.Popen[str]:
    """A process with a stub's command line behind its program."""
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *names], stdout=subprocess.PIPE, text=True)


def naming(pid: int) -> tuple[str, ...]:
    """What tritonserver writes behind the model: region, its size and growth, its own pid, a folder."""
    return "triton_python_backend_shm_region_1-ab", "1048576", "1048576", str(pid), "/tmp"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_the_server_is_the_one_that_the_command_line_names(server: subprocess.Popen[bytes]) -> None:
    with stub(*naming(server.pid)) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == server.pid
        assert process.poll() is None
        server.kill()
        server.wait()
        assert process.wait(_ENDED_S) == 1


def test_a_stub_that_starts_when_its_server_has_died_ends(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
    with stub(*naming(server.pid)) as process:
        assert process.wait(_ENDED_S) == 1


def test_without_such_a_command_line_it_is_the_parent() -> None:
    with stub("other", "words") as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == os.getpid()
        process.kill()
