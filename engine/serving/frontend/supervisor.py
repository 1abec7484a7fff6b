"""Keep one engine process alive for a model: start it, notice its death, start it again, or give up with a sentence."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time

import msgspec

from engine import env, interpreter, signals
from engine.config import EngineConfig
from engine.serving.link.engine_view import EngineView
from engine.serving.link.process_watch import ProcessWatch, start_time
from engine.serving.link.run_folder import EngineState, RunFolder
from engine.watcher import Watcher

logger = logging.getLogger("nereid.supervisor")

_LEAD_S = 0.2  # between tries to become the leader
_WATCH_S = 0.1  # between looks at a living engine
_STEADY_S = 60.0  # an engine that lived so long was not part of a row of crashes
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_CLOSE_S = 10.0
_JUDGE_S = 0.2  # for the link to hear what an engine ran when it died
_TOLD_S = 2 * _LEAD_S  # for other frontends to make a folder again that was removed, and what they told there
_HOPELESS_S = 30.0  # without an engine, and without a folder to start one in


class Supervisor:
    """Every frontend has one; the one that holds the model's lock leads, the others wait to take its place.

    engine: what is known of the engine process; told who leads. module: what the engine process runs.
    """

    def __init__(
        self,
        folder: RunFolder,
        model_name: str,
        config: EngineConfig,
        *,
        restart_limit: int,
        hang_timeout_s: float,
        engine: EngineView,
        module: str = "engine.serving.host",
    ) -> None:
        self._folder = folder
        self._model_name = model_name
        self._config = config
        self._restart_limit = restart_limit
        self._hang_timeout_s = hang_timeout_s
        self._engine = engine
        self._module = module
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._complaint: str | None = None
        self._well = time.monotonic()  # when an engine was last there, or could have been started
        self._thread = threading.Thread(target=self._run, name="nereid-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop supervising; the engine process lives on. It may not have been started."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def close_engine(self) -> None:
        """End what runs of the model's engine processes: politely, then not. For the last frontend that leaves."""
        for pid in self._living():
            watch = ProcessWatch(pid)
            watch.kill(signal.SIGTERM)
            if not watch.wait(_CLOSE_S):
                watch.kill(signal.SIGKILL)
                watch.wait(_CLOSE_S)
            watch.close()
        self._reap()

    def _living(self) -> set[int]:
        state = self._folder.read_state()
        living = {engine.pid for engine in self._folder.engines()}
        return living if state is None or state.failed is not None else living | {state.pid}

    def _run(self) -> None:
        """Lead when no other frontend does. Whatever fails here is said and tried again: nobody else does this work."""
        while not self._closing.is_set():
            lock: int | None = None
            try:
                lock = self._folder.try_lead()
                self._tell_served()
                if lock is not None:
                    self._engine.leading = True
                    if self._lead(lock):
                        return
                    self._engine.leading = False
                self._well = time.monotonic()
            except OSError as error:
                self._complain(f"the run folder {self._folder.path} cannot be used ({_why(error)})")
                if self._hopeless():
                    self._engine.leading = True
                    self._give_up(self._folder.read_state() or EngineState(0, 0), self._unusable(error))
                    return
            except Exception:
                logger.exception("supervision of the engine process begins again")
            finally:
                if lock is not None:
                    os.close(lock)
            self._closing.wait(_LEAD_S)

    def _hopeless(self) -> bool:
        """Whether nobody can lead and no engine has been there for long; at once when the model is being loaded."""
        state = self._folder.read_state()
        if state is None:
            return not self._engine.served.is_set()
        if state.failed is None and start_time(state.pid) is not None:
            self._well = time.monotonic()
        return time.monotonic() - self._well > _HOPELESS_S

    def _lead(self, lock: int) -> bool:
        """Keep an engine running. True when that is over for good, False when the lead is lost."""
        state = self._adopt()
        epoch = 0 if state is None else state.epoch
        crashes, before = 0, 0  # in a row, and how many there were to blame on requests when it began
        while not self._closing.is_set():
            if state is not None and state.failed is not None:
                return True
            born, blamed = time.monotonic(), self._engine.blamed
            try:
                if state is None:
                    epoch += 1
                    state = self._spawn(epoch)
            except OSError as error:
                ending = f"the engine process could not be started ({_why(error)})"
            except _Unwritable as error:
                ending = self._unusable(error.cause)
            else:
                if not self._watch(state, lock):
                    return self._closing.is_set()
                ending = self._folder.read_failure(epoch) or self._ending(state)
            if not crashes or time.monotonic() - born > _STEADY_S:
                crashes, before = 0, blamed
            crashes += 1
            served = self._has_served()
            if not served or self._too_many(crashes, before):
                if served:
                    ending = f"{ending}. It was started {crashes} times in a row and will not be started again"
                self._give_up(EngineState(epoch, 0 if state is None else state.pid), ending)
                return True
            if self._closing.wait(_BACKOFF_S[min(crashes - 1, len(_BACKOFF_S) - 1)]):
                return True
            if not self._folder.holds(lock):
                return False
            state = None
        return True

    def _has_served(self) -> bool:
        """Whether an engine of this model has taken requests, of this frontend or of one that was there before: an
        engine that dies in the model's first load ends that."""
        if not (self._engine.served.is_set() or self._folder.has_served()):
            self._closing.wait(_TOLD_S)
        return self._engine.served.is_set() or self._folder.has_served()

    def _tell_served(self) -> None:
        if self._engine.served.is_set():
            with contextlib.suppress(OSError):
                self._folder.tell_served()

    def _too_many(self, crashes: int, before: int) -> bool:
        """Whether the engine itself has died too often. What the last one ran may be known in a moment."""
        if crashes - (self._engine.blamed - before) <= self._restart_limit:
            return False
        self._closing.wait(_JUDGE_S)
        return crashes - (self._engine.blamed - before) > self._restart_limit

    def _adopt(self) -> EngineState | None:
        """What the frontend that led before left: the newest engine that lives, told of or not. Older ones end."""
        state = self._folder.read_state()
        if state is not None and state.failed is not None:
            return state
        living = self._folder.engines()
        if living and (state is None or living[-1].epoch > state.epoch):
            state = living[-1]
        for engine in living:
            if state is not None and engine.pid != state.pid:
                watch = ProcessWatch(engine.pid)
                watch.kill(signal.SIGKILL)
                watch.close()
        if state is not None:
            self._publish(state)
        return state

    def _watch(self, state: EngineState, lock: int) -> bool:
        """Wait for the engine to die, or kill it when it hangs. False when the frontend closes or another leads."""
        watch, watcher = ProcessWatch(state.pid), Watcher()
        try:
            while not watch.wait(_WATCH_S):
                watcher.look()
                if self._closing.is_set() or not self._folder.holds(lock):
                    return False
                if watcher.counted(self._engine.silent_s) > self._hang_timeout_s:
                    watch.kill(signal.SIGKILL)
                with contextlib.suppress(OSError):
                    self._folder.restore()
                self._tell_served()
                if self._complaint is not None:
                    self._publish(state)
                watcher.rest()
        finally:
            watch.close()
        return not self._closing.is_set()

    def _spawn(self, epoch: int) -> EngineState:
        """Start engine `epoch`. It watches the server's process itself, so it never outlives it.

        Raises OSError when there is no process, _Unwritable when the first one cannot be told of: it is ended.
        """
        self._reap()
        root = self._folder.server_folder.parent
        arguments = [str(root), str(self._folder.server_pid), self._folder.path.name, str(epoch), self._model_name]
        self._child = interpreter.start(
            ["-m", self._module, *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the server's terminal is the server's business
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as config:
            config.write(msgspec.json.encode(self._config))
        state = EngineState(epoch, self._child.pid)
        failed = self._publish(state)
        if failed is not None and not self._engine.served.is_set():
            self._child.kill()
            self._reap()
            raise _Unwritable(failed)
        return state

    def _publish(self, state: EngineState) -> OSError | None:
        """Tell the other frontends. What keeps them from hearing is said, and tried again while the engine runs."""
        try:
            self._folder.write_state(state)
        except OSError as error:
            self._complain(
                f"the other frontends cannot be told of engine {state.epoch} (pid {state.pid}): {_why(error)}"
            )
            return error
        self._complaint = None
        return None

    def _give_up(self, state: EngineState, sentence: str) -> None:
        self._publish(msgspec.structs.replace(state, failed=sentence))

    def _complain(self, sentence: str) -> None:
        if sentence != self._complaint:
            logger.warning("%s; tried again", sentence)
        self._complaint = sentence

    def _unusable(self, error: OSError) -> str:
        where = self._folder.path
        return (
            f"the run folder {where} cannot be written ({_why(error)}): make room there, or set {env.RUN_DIR} elsewhere"
        )

    def _ending(self, state: EngineState) -> str:
        self._reap()
        code = self._child.returncode if self._child is not None and self._child.pid == state.pid else None
        if code is None:
            return "the engine process ended"
        if code < 0:
            return f"the engine process was killed by {signals.name(-code)}"
        return f"the engine process ended with exit status {code}"

    def _reap(self) -> None:
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1)


class _Unwritable(Exception):
    """The first engine process cannot be told of: a fault of the machine that whoever loads the model should hear."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _why(error: OSError) -> str:
    return error.strerror or str(error)
