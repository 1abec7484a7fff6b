"""The processes of a model that is shared by several ranks: started together, watched, and ended together.

The engine's process is the first rank. It starts the others, which do what it tells them through a ring in shared
memory. A rank that dies, or says nothing for long, is named, and its group ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from engine import env
from engine.config import EngineConfig
from engine.parallel.leader import LeadingRunner
from engine.parallel.ring import RingWriter

if TYPE_CHECKING:
    from engine.runner.build import Progress
    from kernels.compilation.ahead import Elsewhere

T = TypeVar("T")

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_BLAME_S = 1.0
_END_S = 10.0  # for ranks to end by themselves
_MAX_WORDS = 1 << 16


class RankError(RuntimeError):
    """A rank is gone or hangs; the message names it."""


class Assignment(msgspec.Struct, frozen=True):
    """What a process that follows is told on its standard input. The descriptors are those of its ring."""

    config: EngineConfig
    rank: int
    port: int
    ring: int
    bell: int


class Group:
    """The other ranks of an engine with `config.parallel.tensor` of them."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises OSError when there is no process to be had."""
        self._config = config
        self.size = config.parallel.tensor
        self._timeout_s = config.parallel.hang_timeout_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self._failure: RankError | None = None
        self._failed = threading.Event()
        self.ring = RingWriter(self.size - 1, self._failed.is_set)
        self._processes: list[subprocess.Popen[bytes]] = []
        started: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        # The kernel ends the ranks with the thread that started them.
        self._thread = threading.Thread(target=self._run, args=(started,), name="nereid-ranks", daemon=True)
        self._thread.start()
        error = started.get()
        if error is not None:
            raise error

    @property
    def failure(self) -> RankError | None:
        """Why the group cannot go on, or None."""
        return self._failure

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and on."""
        return [process.pid for process in self._processes]

    def lead(self, progress: Progress | None, elsewhere: Elsewhere | None) -> LeadingRunner:
        """The runner of the first rank, which is this process, over all of them. Imports torch.

        Raises RankError when another rank fails first, else what `runner_of` does; the group has ended then.
        """
        from engine.parallel.start import runner_of

        port, listener = self._port, self._listener.detach()
        try:
            runner = self._guarded(lambda: runner_of(self._config, 0, port, listener, progress, elsewhere))
        except BaseException:
            self._closing.set()
            self._kill()
            raise
        return LeadingRunner(runner, self.ring.send, self.close, self._blamed)

    def _blamed(self) -> RankError | None:
        """The rank that has failed, where another noticed first: a process is seen to be gone in a moment."""
        self._failed.wait(_BLAME_S)
        return self._failure

    def _guarded(self, work: Callable[[], T]) -> T:
        """What `work` gives. Raises RankError as soon as a rank has failed, whatever `work` waits for."""
        ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put((work(), None))
            except BaseException as error:
                ended.put((None, error))

        threading.Thread(target=run, name="nereid-load-rank", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                given, error = ended.get(timeout=_LOOK_S)
                if error is None:
                    return given  # type: ignore[return-value]
                raise self._blamed() or error
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Wait for the ranks to end, which were told to; then end them."""
        self._closing.set()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._thread.join()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _run(self, started: queue.SimpleQueue[OSError | None]) -> None:
        try:
            for rank in range(1, self.size):
                self._processes.append(self._start(rank))
        except OSError as error:
            self._kill()
            started.put(error)
            return
        started.put(None)
        for bell in self.ring.theirs:
            bell.close()
        behind = [(0, time.monotonic())] * (self.size - 1)
        while not self._closing.wait(_LOOK_S):
            for index, process in enumerate(self._processes):
                done = self.ring.done(index)
                if done == self.ring.sent or done != behind[index][0]:
                    behind[index] = (done, time.monotonic())
                sentence = self._fault(index, process, time.monotonic() - behind[index][1])
                if sentence is not None:
                    log.error("%s: the group of %d ranks ends", sentence, self.size)
                    self._failure = RankError(sentence)
                    self._failed.set()
                    self._kill()
                    return

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        bell = self.ring.theirs[rank - 1]
        told = Assignment(self._config, rank, self._port, self.ring.descriptor, bell.fileno())
        process = subprocess.Popen(
            [str(env.read().python), "-m", "engine.parallel.worker"],
            stdin=subprocess.PIPE,
            pass_fds=[self.ring.descriptor, bell.fileno()],
            start_new_session=True,
            env=env.inherited(**env.one_gpu(rank)),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode(told))
        return process

    def _fault(self, index: int, process: subprocess.Popen[bytes], behind_s: float) -> str | None:
        """What is wrong with a rank; None when nothing is."""
        name = f"rank {index + 1} (pid {process.pid})"
        code = process.poll()
        if code is not None:
            if code < 0:
                return f"{name} was killed by {signal.Signals(-code).name}"
            return self._last_words(index) or f"{name} ended with exit status {code}"
        silent = self.ring.silent_s(index)
        if silent is not None and silent > self._timeout_s:
            return f"{name} has not run for {silent:.0f} s"
        if behind_s > self._timeout_s:
            return f"{name} has been at the same step for {behind_s:.0f} s"
        return None

    def _last_words(self, index: int) -> str | None:
        """Why a rank ended, if it could say so."""
        with contextlib.suppress(OSError):
            words = self.ring.bell(index).recv(_MAX_WORDS, socket.MSG_DONTWAIT).decode(errors="replace")
            return f"rank {index + 1}: {words}" if words else None
        return None
