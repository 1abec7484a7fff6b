"""Notice at once that another process has died, whoever its parent is."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import threading
import time
from pathlib import Path

# Of the command line of a stub, and of the shell that becomes one: region, its size and growth, the server.
STUB = re.compile(r"(triton_python_backend_shm_region_[\w-]+)[\0 ]\d+[\0 ]\d+[\0 ](\d+)[\0 ]")
_FOREVER_S = 3600.0


class ProcessWatch:
    """Watches one process by a pidfd (Linux 5.3), which neither a zombie nor a reused pid deceives.

    `fd` becomes readable when the process ends. Where pidfds are missing it is None and `dead` asks /proc.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd: int | None = None
        self._gone = False
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
        except OSError:  # no pidfds on this kernel, or no descriptor is left
            self._started = start_time(pid)

    def dead(self) -> bool:
        if self._gone:
            return True
        if self.fd is not None:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            self._gone = bool(poll.poll(0))
        else:
            self._gone = start_time(self.pid) is None or start_time(self.pid) != self._started
        return self._gone

    def wait(self, timeout_s: float) -> bool:
        """True once the process is dead, False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.dead():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self.fd is not None:
                select.select([self.fd], [], [], left)
            else:
                time.sleep(min(left, 0.05))
        return True

    def kill(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone already is fine."""
        with contextlib.suppress(ProcessLookupError):
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, number)
            elif not self.dead():
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd, self._gone = None, True


def server_pid() -> int:
    """The pid of the tritonserver that started this process, a stub. Its command line names it: a stub whose server
    dies meanwhile gets another parent."""
    command = Path("/proc/self/cmdline").read_bytes().decode(errors="replace")
    found = STUB.search(command)
    return os.getppid() if found is None else int(found[2])


def die_with(pid: int) -> None:
    """End this process when `pid` ends. A stub whose server was killed would wait for it for ever."""

    def watch() -> None:
        server = ProcessWatch(pid)
        while not server.wait(_FOREVER_S):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="nereid-server-watch", daemon=True).start()


def start_time(pid: int) -> str | None:
    """Clock ticks since boot at which `pid` started, or None when it is dead (a zombie counts as dead).

    Raises OSError when descriptors have run out, for then nobody knows.
    With the pid it names a process for good. Source: proc(5), fields 3 and 22 of /proc/PID/stat.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else fields[19]


def parent(pid: int) -> int | None:
    """The parent of a process, dead or alive; None when it is gone. Source: proc(5), field 4 of /proc/PID/stat."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on; before it stands a name that may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
