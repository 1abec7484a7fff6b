"""Keep one engine process alive for a model: start it, notice its death, start it again, or give up with a sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import msgspec

from engine import env
from engine.config import EngineConfig
from engine.serving.process_watch import ProcessWatch
from engine.serving.run_folder import EngineState, RunFolder

_LEAD_S = 0.2  # between tries to become the leader
_WATCH_S = 0.1  # between looks at a living engine
_STEADY_S = 60.0  # an engine that lived so long was not part of a row of crashes
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_CLOSE_S = 10.0


class Supervisor:
    """Every frontend has one; the one that holds the model's lock leads, the others wait to take its place.

    served: whether an engine process of this model has ever been ready.
    silent_s: seconds since it was last heard from.
    module: what the engine process runs.
    """

    def __init__(
        self,
        folder: RunFolder,
        model_name: str,
        config: EngineConfig,
        *,
        restart_limit: int,
        hang_timeout_s: float,
        served: Callable[[], bool],
        silent_s: Callable[[], float],
        module: str = "engine.serving.host",
    ) -> None:
        self._folder = folder
        self._model_name = model_name
        self._config = config
        self._restart_limit = restart_limit
        self._hang_timeout_s = hang_timeout_s
        self._served = served
        self._silent_s = silent_s
        self._module = module
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self.leading = False
        self._thread = threading.Thread(target=self._run, name="nereid-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop supervising; the engine process lives on."""
        self._closing.set()
        self._thread.join()

    def close_engine(self) -> None:
        """End the current engine process: politely, then not. For the last frontend that leaves."""
        state = self._folder.read_state()
        if state is None or state.failed is not None:
            return
        watch = ProcessWatch(state.pid)
        watch.kill(signal.SIGTERM)
        if not watch.wait(_CLOSE_S):
            watch.kill(signal.SIGKILL)
            watch.wait(_CLOSE_S)
        watch.close()
        self._reap()

    def _run(self) -> None:
        lock: int | None = None
        while lock is None and not self._closing.is_set():
            lock = self._folder.try_lead()
            if lock is None:
                self._closing.wait(_LEAD_S)
        if lock is None:
            return
        self.leading = True
        try:
            self._lead()
        finally:
            os.close(lock)

    def _lead(self) -> None:
        state = self._folder.read_state()
        crashes = 0
        while not self._closing.is_set():
            if state is not None and state.failed is not None:
                return
            if state is None:
                state = self._spawn(1)
            born = time.monotonic()
            self._watch(state)
            if self._closing.is_set():
                return
            crashes = 1 if time.monotonic() - born > _STEADY_S else crashes + 1
            ending = self._folder.read_failure(state.epoch) or self._ending(state)
            if not self._served() or crashes > self._restart_limit:
                if self._served():
                    ending = f"{ending}. It was started {crashes} times in a row and will not be started again"
                self._folder.write_state(EngineState(state.epoch, state.pid, failed=ending))
                return
            if self._closing.wait(_BACKOFF_S[min(crashes - 1, len(_BACKOFF_S) - 1)]):
                return
            state = self._spawn(state.epoch + 1)

    def _watch(self, state: EngineState) -> None:
        """Wait for the engine to die, or kill it when it hangs."""
        watch = ProcessWatch(state.pid)
        try:
            while not watch.wait(_WATCH_S) and not self._closing.is_set():
                if self._silent_s() > self._hang_timeout_s:
                    watch.kill(signal.SIGKILL)
        finally:
            watch.close()

    def _spawn(self, epoch: int) -> EngineState:
        """Start engine `epoch`. It watches the server's process itself, so it never outlives it."""
        self._reap()
        self._folder.config_file().write_bytes(msgspec.json.encode(self._config))
        root = self._folder.server_folder.parent
        arguments = [str(root), str(self._folder.server_pid), self._folder.path.name, str(epoch), self._model_name]
        self._child = subprocess.Popen(
            [str(env.read().python), "-m", self._module, *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the server's terminal is the server's business
        )
        state = EngineState(epoch, self._child.pid)
        self._folder.write_state(state)
        return state

    def _ending(self, state: EngineState) -> str:
        self._reap()
        code = self._child.returncode if self._child is not None and self._child.pid == state.pid else None
        if code is None:
            return "the engine process ended"
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit status {code}"

    def _reap(self) -> None:
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1)
