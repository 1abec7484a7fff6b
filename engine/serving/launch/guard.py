"""End tritonserver and all that it started when `nereid serve` is stopped or killed: politely, then not.

A process of its own, so that a `nereid serve` that is killed leaves nothing behind:
`python -m engine.serving.launch.guard SERVER_PID EXIT_TIMEOUT_S`. A byte on its standard input says that the server
has been told to stop, the end of the input that `nereid serve` has died. It ends when the server has.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import env
from engine.plain import plain
from engine.serving.link.process_watch import STUB, ProcessWatch, parent, start_time
from engine.serving.link.run_folder import end_streams

SHARED_MEMORY = Path("/dev/shm")
_REGION = re.compile(r"/dev/shm/(triton_python_backend_shm_region_[\w-]+)")
_LOOK_S = 1.0
_GRACE_S = 2.0  # beyond the exit timeout
# Before its end, in which the server unloads its models: tritonserver 2.51 crashes when streams are open at the end.
_UNLOAD_S = 6.0
_LEAVE_S = 2.0  # what the server started ends with it by itself


def start(server_pid: int, exit_timeout_s: int) -> subprocess.Popen[bytes]:
    """Guard the server of this process. Its sentences go to this process's stderr."""
    return subprocess.Popen(
        [sys.executable, "-m", "engine.serving.launch.guard", str(server_pid), str(exit_timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[3],  # where `engine` is found
        start_new_session=True,  # what kills the group of `nereid serve` does not kill it
    )


def tell(guard: subprocess.Popen[bytes]) -> None:
    """The server has been told to stop: from now on its time runs."""
    assert guard.stdin is not None
    with contextlib.suppress(OSError):
        os.write(guard.stdin.fileno(), b".")


class Guard:
    """Watches one server. orders: the descriptor that says when to stop; say: where sentences go; end_streams: has the
    server's frontends end what streams they have."""

    def __init__(
        self,
        server: ProcessWatch,
        exit_timeout_s: float,
        orders: int,
        say: Callable[[str], None],
        end_streams: Callable[[], None],
    ) -> None:
        self._server = server
        self._streams_s = exit_timeout_s - min(_UNLOAD_S, exit_timeout_s / 2)
        self._limit_s = exit_timeout_s + _GRACE_S
        self._orders = orders
        self._say = say
        self._end_streams = end_streams
        self._stopped: float | None = None
        self._started: dict[int, str] = {}
        self._regions: set[str] = set()

    def run(self) -> None:
        """Until the server and all that it started have ended."""
        ended = killed = False
        while not self._server.dead():
            self._look()
            self._wait()
            if self._stopped is None:
                continue
            passed_s = time.monotonic() - self._stopped
            if not ended and passed_s > self._streams_s:
                ended = True
                self._end_streams()
            if not killed and passed_s > self._limit_s:
                killed = True
                self._say(
                    f"the server has not ended {self._limit_s:g} s after it was told to, as when a client holds a "
                    "stream open: it is killed"
                )
                self._server.kill(signal.SIGKILL)
        self._find_newborn()
        self._end_the_rest()
        self._remove(self._regions)

    def _wait(self) -> None:
        """Until the server ends, an order comes, or it is time to look around again."""
        poll = select.poll()
        if self._stopped is None:
            poll.register(self._orders, select.POLLIN)
        if self._server.fd is not None:
            poll.register(self._server.fd, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000)]
        if self._orders in ready:
            self._stopped = time.monotonic()
            if not os.read(self._orders, 1) and not self._server.dead():
                self._say("nereid serve has died: the server is told to stop")
                self._server.kill(signal.SIGTERM)

    def _look(self) -> None:
        """Note what the server has started, and remove regions that it has given up and left."""
        self._started = {pid: began for pid in descendants(self._server.pid) if (began := start_time(pid))}
        mapped = regions(self._server.pid)
        if mapped is not None:
            self._remove(self._regions - mapped)
            self._regions = mapped

    def _find_newborn(self) -> None:
        """Stubs that the server started since the last look are nobody's children now; each names its server."""
        for pid, region, server in stubs():
            if server == self._server.pid and (began := start_time(pid)):
                self._started.setdefault(pid, began)
                self._regions.add(region)

    def _end_the_rest(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        for pid, began in self._started.items():
            watch = ProcessWatch(pid)
            if start_time(pid) == began and not watch.wait(max(0.0, deadline - time.monotonic())):
                self._say(f"process {pid} has not ended with the server: it is killed")
                watch.kill(signal.SIGKILL)
                watch.wait(_LEAVE_S)
            watch.close()

    def _remove(self, names: set[str]) -> None:
        for name in names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (above := parent(int(name))) is not None:
            children.setdefault(above, []).append(int(name))
    found: set[int] = set()
    left = [pid]
    while left:
        fresh = [child for child in children.get(left.pop(), ()) if child not in found]
        found.update(fresh)
        left.extend(fresh)
    return found


def stubs() -> Iterator[tuple[int, str, int]]:
    """(pid, shared memory region, pid of its server) of each instance of the Python backend."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
            found = STUB.search(command.decode(errors="replace"))
            if found is not None:
                yield int(name), found[1], int(found[2])


def regions(pid: int) -> set[str] | None:
    """Names of the shared memory regions of Python-backend instances that a server has mapped: those of its own.

    None when the server is gone.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
    return set(_REGION.findall(maps)) if maps else None


def main() -> None:
    # What stops all processes of a service at once, as systemd does, leaves the one that sees to their end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    server_pid, exit_timeout_s = (int(word) for word in sys.argv[1:])

    def say(sentence: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may have gone with `nereid serve`
            print(plain(sentence), file=sys.stderr, flush=True)

    stop_streams = functools.partial(end_streams, env.read().run_dir, server_pid)
    Guard(ProcessWatch(server_pid), exit_timeout_s, sys.stdin.fileno(), say, stop_streams).run()


if __name__ == "__main__":
    main()
