"""What a server that is gone has started ends with it, however short before."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from engine.serving.launch import guard
from engine.serving.link.process_watch import ProcessWatch


class Stub:
    """A process under the command line of a stub of `server`, and its region."""

    def __init__(self, server: int, shell: bool = False) -> None:
        self.region = f"triton_python_backend_shm_region_{uuid.uuid4()}"
        words = ["/x/triton_python_backend_stub", "/m/1/model.py", self.region, "4194304", "1048576", str(server)]
        words += ["/x/backends/python", "336", "demo_0_0", "DEFAULT"]
        command = ["-c", f"read line; : {' '.join(words)}"] if shell else ["-c", "read line; :", *words]
        self.process = subprocess.Popen(["/bin/sh", *command], stdin=subprocess.PIPE)
        (guard.SHARED_MEMORY / self.region).write_bytes(b"")

    def left(self) -> tuple[bool, bool]:
        """Whether its process and its region are there."""
        return self.process.poll() is None, (guard.SHARED_MEMORY / self.region).exists()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        (guard.SHARED_MEMORY / self.region).unlink(missing_ok=True)


@pytest.fixture
def made() -> Iterator[list[Stub]]:
    stubs: list[Stub] = []
    yield stubs
    for stub in stubs:
        stub.close()


def test_stubs_that_were_started_since_the_last_look_end_too(made: list[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_LEAVE_S", 0.1)
    server = subprocess.Popen(["/bin/true"])
    watch = ProcessWatch(server.pid)
    made += [Stub(server.pid), Stub(server.pid, shell=True), Stub(os.getpid())]
    orders, _ = os.pipe()
    said: list[str] = []
    guard.Guard(watch, 1.0, orders, said.append, lambda: None).run()
    mine, shell, others = (stub.left() for stub in made)
    assert (mine, shell) == ((False, False), (False, False))
    assert others == (True, True)
    assert len(said) == 2


def test_streams_are_ended_while_there_is_time_to_unload_and_the_server_killed_after_it() -> None:
    server = subprocess.Popen(["/bin/sleep", "60"])
    watch = ProcessWatch(server.pid)
    orders, told = os.pipe()
    os.write(told, b".")
    steps: list[tuple[str, float]] = []
    began = time.monotonic()

    def note(step: str) -> None:
        steps.append((step, time.monotonic() - began))

    threading.Thread(target=server.wait).start()  # else it stays as a zombie
    guard.Guard(watch, 1.0, orders, note, lambda: note("streams end")).run()
    (first, early), (second, late) = steps
    assert first == "streams end"
    assert "it is killed" in second
    assert 0.5 <= early < late
