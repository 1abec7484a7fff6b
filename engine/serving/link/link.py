"""A frontend's end of the link: finds the current engine process, talks to it, notices its death."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from typing import Protocol

from engine.serving.link import messages
from engine.serving.link.engine_view import EngineView
from engine.serving.link.messages import (
    Abort,
    Alone,
    Bye,
    Events,
    Hello,
    Ready,
    Reset,
    Sent,
    Stats,
    Submit,
    ToEngine,
    WasReset,
)
from engine.serving.link.pipe import Pipe
from engine.serving.link.process_watch import ProcessWatch
from engine.serving.link.run_folder import EngineState, RunFolder
from engine.types import RequestInput, TokenEvent

_LOOK_S = 0.02  # between looks at the state file while there is no engine
_AGAIN_S = 0.5  # before an engine that could not be watched is tried again
_POLL_MS = 50

logger = logging.getLogger("nereid.link")


class Receiver(Protocol):
    """What a frontend hears. All calls come from the link's thread and must not block."""

    def on_ready(self, context: int) -> None:
        """An engine takes requests of up to `context` tokens from now on: what is in flight is to be sent (again)."""
        ...

    def on_events(self, events: list[TokenEvent], pressed: bool) -> None:
        """What a step gave. pressed: the next step's is here already."""
        ...

    def on_stats(self, stats: Stats) -> None: ...

    def on_alone(self, request_id: str | None) -> None:
        """Which request alone the engine runs from now on (`Quarantine.alone`)."""
        ...

    def on_reset(self, number: int) -> None:
        """The engine's prefix cache is empty, as was asked with `number`."""
        ...

    def on_down(self) -> None:
        """The engine process died; another may come."""
        ...

    def on_failed(self, sentence: str) -> None:
        """No engine will come any more."""
        ...


class Link:
    """One connection to an engine process, for messages both ways.

    `submit` and `abort` may be called from any thread. They drop the message while no engine is there: the receiver
    sends again what is in flight when it hears `on_ready`. engine: told when the engine was heard.
    """

    def __init__(self, folder: RunFolder, name: str, engine: EngineView) -> None:
        self._folder = folder
        self._name = name
        self._engine = engine
        self._lock = threading.Lock()
        self._pipe: Pipe | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, receiver: Receiver) -> None:
        self._thread = threading.Thread(target=self._run, args=(receiver,), name="nereid-link", daemon=True)
        self._thread.start()

    def submit(self, request: RequestInput, suspect: bool = False) -> None:
        """suspect: engines have died while they ran it."""
        self._send(Submit.of(self._name, request, suspect))

    def abort(self, request_ids: list[str]) -> None:
        self._send(Abort(request_ids))

    def reset_prefix_cache(self, number: int) -> None:
        self._send(Reset(self._name, number))

    def close(self) -> None:
        """Say goodbye and end the thread. It may not have been started."""
        self._closing.set()
        self._send(Bye(self._name))
        if self._thread is not None:
            self._thread.join()
        self._drop(linger_s=0.5)

    def _send(self, message: ToEngine) -> None:
        data = messages.encode(message)
        with self._lock:
            if self._pipe is not None:
                self._pipe.send(data)

    def _run(self, receiver: Receiver) -> None:
        known: EngineState | None = None  # what was attended to last
        while not self._closing.is_set():
            state = self._folder.read_state()
            if state is not None and state.failed is not None:
                receiver.on_failed(state.failed)
                return
            if state is None or (known is not None and (state == known or state.epoch < known.epoch)):
                self._closing.wait(_LOOK_S)
                continue
            try:
                watch = ProcessWatch(state.pid)
            except OSError as error:
                logger.warning("engine %d cannot be watched (%s): tried again", state.epoch, error.strerror)
                self._closing.wait(_AGAIN_S)
                continue
            known = state
            self._attend(state, watch, receiver)
            if not self._closing.is_set():
                receiver.on_down()

    def _attend(self, state: EngineState, watch: ProcessWatch, receiver: Receiver) -> None:
        """Talk to one engine process until it dies or the frontend closes."""
        try:
            pipe = self._connect(state, watch)
            if pipe is None:
                return
            with self._lock:
                self._pipe = pipe
            self._send(Hello(self._name))
            self._receive(pipe, watch, receiver)
        finally:
            if self._engine.heard is not None:
                self._engine.lost = time.monotonic()
            self._engine.heard = None
            if not self._closing.is_set():
                self._drop()
            watch.close()

    def _connect(self, state: EngineState, watch: ProcessWatch) -> Pipe | None:
        """The connection, once the engine process listens; None when it dies before, or the frontend closes."""
        while not self._closing.is_set() and not watch.dead():
            with contextlib.ExitStack() as unless:
                try:
                    trying = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    unless.callback(trying.close)
                    trying.connect(self._folder.engine_socket(state.epoch))
                except OSError:
                    self._closing.wait(_LOOK_S)
                    continue
                unless.pop_all()
                return Pipe(trying)
        return None

    def _receive(self, pipe: Pipe, watch: ProcessWatch, receiver: Receiver) -> None:
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        if watch.fd is not None:
            poller.register(watch.fd, select.POLLIN)
        while not self._closing.is_set():
            poller.poll(_POLL_MS)
            arrived = pipe.receive()
            for data in arrived:
                self._dispatch(data, receiver, pressed=len(arrived) > 1)
            if not arrived and watch.dead():
                return
            if pipe.ended:
                watch.wait(_POLL_MS / 1000)  # it is about to die

    def _dispatch(self, data: bytes, receiver: Receiver, pressed: bool) -> None:
        if self._engine.heard is not None:
            self._engine.heard = time.monotonic()
        message = messages.decode_to_frontend(data)
        if isinstance(message, Events):
            receiver.on_events(message.events, pressed)
        elif isinstance(message, Stats):
            receiver.on_stats(message)
        elif isinstance(message, Alone):
            receiver.on_alone(message.request_id)
        elif isinstance(message, WasReset):
            receiver.on_reset(message.number)
        elif isinstance(message, Ready):
            self._engine.heard = time.monotonic()
            receiver.on_ready(message.context)
            self._send(Sent(self._name))

    def _drop(self, linger_s: float = 0.0) -> None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close(linger_s)
