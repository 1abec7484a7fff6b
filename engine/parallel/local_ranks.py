"""The processes of ranks on one host, beside the one that starts them: they follow a ring in shared memory, are
watched, and end together."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from engine import env, interpreter, signals
from engine.config import EngineConfig
from engine.parallel.rendezvous import UNUSABLE, Assignment, Rendezvous
from engine.parallel.ring import RingWriter
from engine.watcher import STILL_S, Watcher

_LOOK_S = 0.1
_END_S = 10.0  # for ranks to end by themselves
_MAX_WORDS = 1 << 16


class LocalRanks:
    """The ranks `ranks` of a model, as processes of this host. taken: GPUs before its own that other processes of the
    launcher hold.

    failed: called once, with a sentence that names the rank, when one is gone or hangs, and whether that would happen
    again. All have ended then.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: range,
        rendezvous: Rendezvous,
        taken: int,
        failed: Callable[[str, bool], None],
    ) -> None:
        """Raises OSError when there is no process to be had."""
        self._config = config
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._taken = taken
        self._failed = failed
        self._timeout_s = config.parallel.hang_timeout_s
        self._closing = threading.Event()
        self._ring = RingWriter(len(ranks), self._closing.is_set)
        self._processes: list[subprocess.Popen[bytes]] = []
        started: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        # The kernel ends the ranks with the thread that started them.
        self._thread = threading.Thread(target=self._run, args=(started,), name="nereid-ranks", daemon=True)
        self._thread.start()
        error = started.get()
        if error is not None:
            raise error

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: bytes) -> None:
        """For one thread. Raises RingClosed when the ranks were ended while it waited for room."""
        self._ring.send(message)

    def close(self) -> None:
        """Wait for the ranks to end, which were told to; then end them."""
        self._closing.set()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        self._thread.join()

    def kill(self) -> None:
        """End the ranks now. For any thread, also again."""
        self._closing.set()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _run(self, started: queue.SimpleQueue[OSError | None]) -> None:
        try:
            for index in range(len(self._ranks)):
                self._processes.append(self._start(index))
        except OSError as error:
            self.kill()
            started.put(error)
            return
        started.put(None)
        for bell in self._ring.theirs:
            bell.close()
        waits = Waits(len(self._ranks))
        while not self._closing.wait(_LOOK_S):
            waits.look([self._ring.done(index) for index in range(len(self._ranks))], self._ring.sent)
            found = self._fault(waits)
            if found is not None:
                self._failed(*found)
                self.kill()
                return
            waits.rest()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        ring, bell, rank, local = self._ring, self._ring.theirs[index], self._ranks[index], self._rendezvous.local
        told = Assignment(self._config, rank, self._rendezvous, ring.descriptor, bell.fileno(), index, len(self._ranks))
        process = interpreter.start(
            ["-m", "engine.parallel.worker"],
            stdin=subprocess.PIPE,
            pass_fds=[ring.descriptor, bell.fileno()],
            start_new_session=True,
            env=env.inherited(**env.one_gpu(rank % local, self._taken, local)),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode(told))
        return process

    def _fault(self, waits: Waits) -> tuple[str, bool] | None:
        """What is wrong with which rank, and whether it would be again; None when nothing is."""
        codes = [process.poll() for process in self._processes]
        ended = cause(codes)
        if ended is not None:
            return self._ended(ended, codes[ended] or 0), codes[ended] == UNUSABLE
        hangs = waits.fault([self._ring.silent_s(index) for index in range(len(self._processes))], self._timeout_s)
        return None if hangs is None else (f"{self._name(hangs[0])} {hangs[1]}", False)

    def _name(self, index: int) -> str:
        return f"rank {self._ranks[index]} (pid {self._processes[index].pid})"

    def _ended(self, index: int, code: int) -> str:
        if code < 0:
            return f"{self._name(index)} was killed by {signals.name(-code)}"
        return self._last_words(index) or f"{self._name(index)} ended with exit status {code}"

    def _last_words(self, index: int) -> str | None:
        """Why a rank ended, if it could say so."""
        with contextlib.suppress(OSError):
            words = self._ring.bell(index).recv(_MAX_WORDS, socket.MSG_DONTWAIT).decode(errors="replace")
            return f"rank {self._ranks[index]}: {words}" if words else None
        return None


def cause(codes: Sequence[int | None]) -> int | None:
    """Which rank's end, by exit statuses, is a fault; None when nobody's is. One that was told to end has ended with 0,
    and whoever told it is about to say so. Where several have ended, one that fails (1) does so for another's end."""
    ended = [index for index, code in enumerate(codes) if code]
    return min(ended, key=lambda index: codes[index] == 1, default=None)


class Waits:
    """How long ranks have been waited for, in the looks of a `Watcher`."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._watcher = Watcher(clock)
        self._behind = [(0, self._watcher.now)] * ranks  # steps done, and since when they are so many

    def look(self, done: list[int], sent: int) -> None:
        self._watcher.look()
        for index, count in enumerate(done):
            if count == sent or count != self._behind[index][0]:
                self._behind[index] = (count, self._watcher.now)

    def rest(self) -> None:
        self._watcher.rest()

    def fault(self, silent: list[float | None], timeout_s: float) -> tuple[int, str] | None:
        """Which rank has been waited for too long, and what it does, in words behind its name. One that stands still is
        why others are at their step for so long. silent: seconds since each was heard."""
        now, counted = self._watcher.now, self._watcher.counted
        still = [counted(seconds or 0.0) for seconds in silent]
        behind = [counted(now - since) for _, since in self._behind]
        stillest, slowest = still.index(max(still)), behind.index(max(behind))
        late = behind[slowest] > timeout_s
        if still[stillest] > (min(STILL_S, timeout_s) if late else timeout_s):
            return stillest, f"has not run for {still[stillest]:.0f} s"
        return (slowest, f"has been at the same step for {behind[slowest]:.0f} s") if late else None
