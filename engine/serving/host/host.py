"""The engine process: one engine behind a socket. Started by a frontend's supervisor as

    python -m engine.serving.host ROOT SERVER_PID KEY EPOCH MODEL_NAME

with the EngineConfig as JSON on its standard input, which no full disk holds up.

It ends when the server's process ends, whatever killed that, or on SIGTERM or SIGINT: not before its frontends have
left, for systemd and the like send that to all processes at once, and frontends stay until their streams have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine import env, heap
from engine.config import EngineConfig
from engine.plain import log_to_stderr
from engine.serving.host.quarantine import Quarantine
from engine.serving.link import messages
from engine.serving.link.messages import (
    NOBODY,
    Abort,
    Alone,
    Bye,
    Events,
    Hello,
    Progress,
    Ready,
    Reset,
    Sent,
    Stats,
    Submit,
    ToFrontend,
    WasReset,
)
from engine.serving.link.pipe import Pipe
from engine.serving.link.process_watch import ProcessWatch
from engine.serving.link.run_folder import RunFolder
from engine.types import RequestError, RequestInput, TokenEvent, rejection

if TYPE_CHECKING:
    from engine.api import Engine

# Messages are taken in beside a thread that launches kernels without pause and wakes on time: threads of the engine
# process hand over ten times as often as usual.
SWITCH_S = 5e-4

logger = logging.getLogger("nereid.host")

_STATS_S = 0.1
_NO_FRONTEND_S = 30.0  # without a frontend: long enough for one to be started in place of the last
_BACKLOG = 64
_ACCEPT_S = 0.01  # before a connection that could not be accepted is tried again
_UNITS = {"weights": "bytes"}


class FrontendConnection:
    """The way back to one frontend; the engine's sink for its requests. Safe to use from any thread."""

    def __init__(
        self, name: str, pipe: Pipe, engine_failed: Callable[[], bool], noticed: Callable[[list[TokenEvent]], None]
    ) -> None:
        """noticed: hears of all events that leave."""
        self.name = name
        self.pipe = pipe
        self.live: set[str] = set()
        self._engine_failed = engine_failed
        self._noticed = noticed

    def deliver(self, events: list[TokenEvent]) -> None:
        """Send what one step gave this frontend's requests. Nothing of a failed engine leaves: it ends every request
        with an error, and the next engine process can still finish them."""
        if self._engine_failed():
            return
        for event in events:
            if event.finish_reason is not None:
                self.live.discard(event.request_id)
        self.send(Events(events))
        self._noticed(events)

    def send(self, message: ToFrontend) -> None:
        self.pipe.send(messages.encode(message))


class EngineFactory(Protocol):
    """Builds the engine; takes seconds to minutes, and says how far it is."""

    def __call__(self, config: EngineConfig, progress: ProgressReport) -> Engine: ...


class ProgressReport(Protocol):
    def __call__(self, stage: str, done: int, total: int, unit: str = "") -> None: ...


class Host:
    """Serves one engine to the frontends that say hello. The engine loads on a thread of its own, so that the death
    of the server is noticed during a long load too.

    no_frontend_s: an engine without frontends ends after so long, for nobody else would end it.
    """

    def __init__(
        self,
        folder: RunFolder,
        epoch: int,
        model_name: str,
        config: EngineConfig,
        factory: EngineFactory,
        no_frontend_s: float = _NO_FRONTEND_S,
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._model_name = model_name
        self._config = config
        self._factory = factory
        self._no_frontend_s = no_frontend_s
        self._listener: socket.socket | None = None
        self._listen_error: str | None = None  # why nobody can connect
        self._poller = select.poll()
        self._pipes: dict[int, Pipe] = {}  # by file descriptor
        self._frontends: dict[str, FrontendConnection] = {}
        self._frontends_lost = 0  # frontends that went without a word
        self._last_frontend_at = time.monotonic()  # when a frontend was last connected
        self._engine: Engine | None = None
        self._failure: str | None = None
        self._loaded = threading.Event()
        self._ready_sent = False  # every frontend hears `Ready` once, whenever it came
        self._told = False  # to end
        self._server = ProcessWatch(folder.server_pid)
        self._quarantine = Quarantine[tuple[FrontendConnection, RequestInput]](self._run_request, self._tell_alone)
        self._passed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._passed_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._passed_event, select.POLLIN)
        self._progress_socket: socket.socket | None = None
        self._stages = {"python": time.monotonic()}  # what the start has come to, and when

    def run(self) -> int:
        """Serve until the server is gone, or SIGTERM or SIGINT. Returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if self._server.fd is not None:
            self._poller.register(self._server.fd, select.POLLIN)
        threading.Thread(target=self._load, name="nereid-load", daemon=True).start()
        status = self._attend()
        # One that has failed may wait for another rank for ever.
        if self._engine is not None and not self._server.dead() and not self._engine_failed():
            self._engine.close()
        return status

    def _attend(self) -> int:
        """Until it is time to end. What nobody foresaw comes out of it and leaves the engine as it is: its requests go
        on in the next."""
        while not self._over:
            self._listen()
            self._serve()
            if self._loaded.is_set() and self._failure is None and not self._ready_sent:
                self._ready_sent = True
                self._quarantine.gather(self._frontends)
                for frontend in self._frontends.values():
                    self._welcome(frontend)
            self._quarantine.look()
            if self._failure is not None:
                self._tell_failure(self._failure)
                return 1
            if self._server.dead():
                self._end_frontends()
                self._folder.remove_all()
                return 0
            if self._engine_failed():
                assert self._engine is not None
                logger.error("the engine has failed: %s", self._engine.failure)
                return 1  # the next engine process goes on with what this one ran
            if self._superseded():
                logger.warning("another engine process has taken the place of this one, which ends")
                return 0
            if self._is_deserted():
                logger.warning("every frontend has died and none has come in their place: the engine process ends")
                return 0
        return 0

    def _listen(self) -> None:
        """Be where frontends look: at the start, and again when the run folder was swept and is there again."""
        path = self._folder.engine_socket(self._epoch)
        if self._listener is not None and os.path.lexists(path):
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
        except OSError as error:
            listener.close()
            if self._listen_error != error.strerror:
                logger.warning("frontends cannot connect at %s (%s): tried again", path, error.strerror)
            self._listen_error = error.strerror
            return
        self._listen_error = None
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        if self._listener is not None:
            self._poller.unregister(self._listener)
            self._listener.close()
        self._listener = listener
        self._poller.register(listener, select.POLLIN)

    def _superseded(self) -> bool:
        """Whether the frontends have gone on to another engine process, as when nobody could be told of this one."""
        state = self._folder.read_state()
        return state is not None and state.epoch >= self._epoch and state.pid != os.getpid()

    def _tell_failure(self, sentence: str) -> None:
        try:
            self._folder.write_failure(self._epoch, sentence)
        except OSError as error:
            logger.error("%s (the run folder cannot be written: %s)", sentence, error.strerror)

    def _serve(self) -> None:
        """Handle messages for a while, then say how the engine is."""
        until = time.monotonic() + _STATS_S
        while (left := until - time.monotonic()) > 0 and not self._over:
            for descriptor, _ in self._poller.poll(int(left * 1000) + 1):
                if self._listener is not None and descriptor == self._listener.fileno():
                    self._accept(self._listener)
                elif descriptor == self._passed_event:
                    self._take_passed()
                elif descriptor in self._pipes:
                    self._receive(self._pipes[descriptor])
                else:
                    return  # the server is dead
        self._report()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except OSError:  # as when descriptors run out: the frontend waits and is taken later
            time.sleep(_ACCEPT_S)
            return
        pipe = Pipe(connected)
        self._pipes[pipe.fileno()] = pipe
        self._poller.register(pipe, select.POLLIN)

    def _receive(self, pipe: Pipe) -> None:
        for data in pipe.receive():
            self._handle(data, pipe)
        if pipe.ended:
            for frontend in [f for f in self._frontends.values() if f.pipe is pipe]:
                self._frontends_lost += 1
                logger.warning("frontend %s is gone: its %d requests are aborted", frontend.name, len(frontend.live))
                self._drop(frontend)
            self._poller.unregister(pipe)
            del self._pipes[pipe.fileno()]
            pipe.close()

    def _handle(self, data: bytes, pipe: Pipe) -> None:
        message = messages.decode_to_engine(data)
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._quarantine.drop(message.request_ids)
            for frontend in self._frontends.values():
                frontend.live.difference_update(message.request_ids)
            if self._engine is not None:
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
        elif isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Sent):
            self._quarantine.sent(message.frontend)
        elif isinstance(message, Hello):
            frontend = FrontendConnection(message.frontend, pipe, self._engine_failed, self._observe_events)
            self._frontends[message.frontend] = frontend
            if self._ready_sent:
                self._welcome(frontend)
        elif isinstance(message, Bye) and message.frontend in self._frontends:
            self._drop(self._frontends[message.frontend])

    def _welcome(self, frontend: FrontendConnection) -> None:
        """The engine takes its requests from now on. Figures first: it counts from where they stand."""
        assert self._engine is not None
        frontend.send(self._stats(self._engine))
        frontend.send(Ready(self._engine.context))
        if self._quarantine.alone != NOBODY:
            frontend.send(Alone(self._quarantine.alone))

    def _submit(self, message: Submit) -> None:
        frontend = self._frontends.get(message.frontend)
        if frontend is None or self._engine is None:
            return  # it has died meanwhile, or has not heard `Ready` and will send again
        request = message.whole()
        frontend.live.add(request.request_id)
        self._quarantine.take(request.request_id, (frontend, request), message.suspect)

    def _reset(self, message: Reset) -> None:
        frontend = self._frontends.get(message.frontend)
        if frontend is not None and self._engine is not None:
            told = WasReset(message.number)
            self._engine.reset_prefix_cache(lambda: frontend.send(told))

    def _run_request(self, item: tuple[FrontendConnection, RequestInput]) -> None:
        assert self._engine is not None
        frontend, request = item
        try:
            self._engine.submit(request, frontend)
        except RequestError as error:
            frontend.deliver([rejection(request.request_id, error)])

    def _tell_alone(self, request_id: str | None) -> None:
        for frontend in self._frontends.values():
            frontend.send(Alone(request_id))

    def _observe_events(self, events: list[TokenEvent]) -> None:
        """Called by the loop's thread, as events leave."""
        alone = self._quarantine.alone
        if alone and any(e.request_id == alone and (e.token_ids or e.finish_reason is not None) for e in events):
            self._passed.put(alone)
            os.eventfd_write(self._passed_event, 1)

    def _take_passed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._passed_event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._quarantine.passed(self._passed.get_nowait())

    def _drop(self, frontend: FrontendConnection) -> None:
        del self._frontends[frontend.name]
        self._quarantine.drop(frontend.live)
        self._quarantine.sent(frontend.name)
        if self._engine is not None:
            for request_id in list(frontend.live):
                self._engine.abort(request_id)

    def _end_frontends(self) -> None:
        """A frontend ends by itself when its server has died, but for one that was just setting a gauge: the Python
        backend holds the interpreter's lock until the server answers."""
        for pipe in self._pipes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pipe.peer, signal.SIGKILL)

    def _is_deserted(self) -> bool:
        """Whether frontends have been missing for long and none is about to come. The folder is gone then."""
        if self._frontends:
            self._last_frontend_at = time.monotonic()
        if time.monotonic() - self._last_frontend_at < self._no_frontend_s:
            return False
        with self._folder.leave() as last:
            return last

    def _report(self) -> None:
        if self._engine is not None:
            stats = self._stats(self._engine)
            for frontend in self._frontends.values():
                frontend.send(stats)

    def _stats(self, engine: Engine) -> Stats:
        now = engine.stats()
        return Stats(
            running=now.running,
            waiting=now.waiting + len(self._quarantine),
            blocks_used=sum(group.used for group in now.groups),
            blocks_total=sum(group.total for group in now.groups),
            cache_dtype=now.cache_dtype,
            prefix_queries=now.prefix_query_tokens,
            prefix_hits=now.prefix_hit_tokens,
            preemptions=now.preemptions,
            prompt_tokens=now.prompt_tokens,
            generated_tokens=now.generated_tokens,
            late_compiles=now.late_compiles,
            drafts=now.drafts,
            draft_tokens=now.draft_tokens,
            accepted_tokens=now.accepted_tokens,
            accepted_at=now.accepted_at,
            frontends=len(self._frontends),
            frontends_lost=self._frontends_lost,
            step_counts=now.step_counts,
            step_tokens=now.step_tokens,
        )

    def _load(self) -> None:
        try:
            address = env.read().progress
            if address is not None:
                self._progress_socket = watcher(address)
            self._engine = self._factory(self._config, self._progress)
            heap.trim_malloc()
            heap.keep_trimmed()
        except (RequestError, ValueError, OSError, RuntimeError, MemoryError) as error:
            logger.debug("load failed", exc_info=True)
            self._failure = str(error) or type(error).__name__
        except BaseException as error:
            logger.exception("load failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._progress(messages.LOADED, 1, 1)
            self._loaded.set()

    def _progress(self, stage: str, done: int, total: int, unit: str = "") -> None:
        self._stages.setdefault(stage, time.monotonic())
        if stage == messages.LOADED:
            began = list(self._stages.items())
            spent = [f"{name} {after - at:.2f} s" for (name, at), (_, after) in itertools.pairwise(began)]
            logger.info("start: %s", ", ".join(spent))
        if self._progress_socket is not None:
            with contextlib.suppress(OSError):  # whoever watches is slow, or has gone
                self._progress_socket.send(messages.encode(Progress(self._model_name, stage, done, total, unit)))

    def _engine_failed(self) -> bool:
        return self._engine is not None and self._engine.failure is not None

    @property
    def _over(self) -> bool:
        return self._told and not self._frontends

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True


def watcher(address: str) -> socket.socket | None:
    """Where reports of a start go; None when nobody listens any more."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    connected.setblocking(False)
    try:
        connected.connect(address)
    except OSError:
        connected.close()
        return None
    return connected


def load_engine(config: EngineConfig, progress: ProgressReport) -> Engine:
    """The real engine. torch is imported behind this, and by no other part of the serving side."""
    heap.collect_seldom()
    sys.setswitchinterval(SWITCH_S)
    progress("import torch", 0, 0)
    from engine.api import Engine

    def report(stage: str, done: int, total: int) -> None:
        progress(stage, done, total, _UNITS.get(stage, ""))

    return Engine.from_config(config, progress=report, launched=env.read().launched).start()


def main(arguments: list[str], factory: EngineFactory = load_engine) -> int:
    root, server_pid, key, epoch, model_name = arguments
    log_to_stderr(f"nereid {model_name}: %(message)s")
    folder = RunFolder(Path(root), int(server_pid), key)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        status = Host(folder, int(epoch), model_name, config, factory).run()
    except Exception:
        logger.exception("the engine process ends")
        status = 1
    sys.stderr.flush()
    os._exit(status)  # threads that wait in C libraries must not hold up the end
