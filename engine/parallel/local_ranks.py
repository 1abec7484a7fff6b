"""The processes of ranks on one host, beside the one that starts them: they follow a ring in shared memory, are
watched, and end together."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import msgspec

from engine import env, signals
from engine.config import EngineConfig
from engine.parallel.meeting import UNUSABLE, Assignment, Meeting
from engine.parallel.ring import RingWriter

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
        self, config: EngineConfig, ranks: range, meeting: Meeting, taken: int, failed: Callable[[str, bool], None]
    ) -> None:
        """Raises OSError when there is no process to be had."""
        self._config = config
        self._ranks = ranks
        self._meeting = meeting
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
        behind = [(0, time.monotonic())] * len(self._ranks)
        while not self._closing.wait(_LOOK_S):
            for index, process in enumerate(self._processes):
                done = self._ring.done(index)
                if done == self._ring.sent or done != behind[index][0]:
                    behind[index] = (done, time.monotonic())
                sentence = self._fault(index, process, time.monotonic() - behind[index][1])
                if sentence is not None:
                    self._failed(sentence, process.poll() == UNUSABLE)
                    self.kill()
                    return

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        ring, bell, rank, local = self._ring, self._ring.theirs[index], self._ranks[index], self._meeting.local
        told = Assignment(self._config, rank, self._meeting, ring.descriptor, bell.fileno(), index, len(self._ranks))
        process = subprocess.Popen(
            [str(env.read().python), "-m", "engine.parallel.worker"],
            stdin=subprocess.PIPE,
            pass_fds=[ring.descriptor, bell.fileno()],
            start_new_session=True,
            env=env.inherited(**env.one_gpu(rank % local, self._taken, local)),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode(told))
        return process

    def _fault(self, index: int, process: subprocess.Popen[bytes], behind_s: float) -> str | None:
        """What is wrong with a rank; None when nothing is."""
        name = f"rank {self._ranks[index]} (pid {process.pid})"
        code = process.poll()
        # One that was told to end has ended with 0, and whoever told it is about to say so.
        if code:
            if code < 0:
                return f"{name} was killed by {signals.name(-code)}"
            return self._last_words(index) or f"{name} ended with exit status {code}"
        silent = self._ring.silent_s(index)
        if silent is not None and silent > self._timeout_s:
            return f"{name} has not run for {silent:.0f} s"
        if behind_s > self._timeout_s:
            return f"{name} has been at the same step for {behind_s:.0f} s"
        return None

    def _last_words(self, index: int) -> str | None:
        """Why a rank ended, if it could say so."""
        with contextlib.suppress(OSError):
            words = self._ring.bell(index).recv(_MAX_WORDS, socket.MSG_DONTWAIT).decode(errors="replace")
            return f"rank {self._ranks[index]}: {words}" if words else None
        return None
