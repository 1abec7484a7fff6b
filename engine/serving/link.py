"""A frontend's end of the link: finds the current engine process, talks to it, notices its death."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Protocol

import zmq

from engine.serving import messages
from engine.serving.messages import Abort, Bye, Events, Hello, Ready, Stats, Submit, ToEngine
from engine.serving.process_watch import ProcessWatch
from engine.serving.run_folder import EngineState, RunFolder
from engine.types import RequestError, RequestInput, TokenEvent

_LOOK_S = 0.02  # between looks at the state file while there is no engine
_POLL_MS = 50


class Receiver(Protocol):
    """What a frontend hears. All calls come from the link's thread and must not block."""

    def on_ready(self, context: int) -> None:
        """An engine takes requests of up to `context` tokens from now on: what is in flight is to be sent (again)."""
        ...

    def on_events(self, events: list[TokenEvent], pressed: bool) -> None:
        """What a step gave. pressed: the next step's is here already."""
        ...

    def on_stats(self, stats: Stats) -> None: ...

    def on_down(self) -> None:
        """The engine process died; another may come."""
        ...

    def on_failed(self, sentence: str) -> None:
        """No engine will come any more."""
        ...


class Link:
    """Two one-way sockets an engine process: frontend → engine (shared by all frontends) and engine → frontend.

    `submit` and `abort` may be called from any thread. They drop the message while no engine is there: the receiver
    sends again what is in flight when it hears `on_ready`.
    """

    def __init__(self, folder: RunFolder, name: str, receiver: Receiver) -> None:
        self._folder = folder
        self._name = name
        self._receiver = receiver
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._outbox: zmq.Socket[bytes] | None = None
        self._closing = threading.Event()
        self._heard = time.monotonic()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nereid-link", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine was last heard; 0 while it is not up."""
        return time.monotonic() - self._heard if self._up.is_set() else 0.0

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: RequestInput) -> None:
        """Raises RequestError when the request holds a number that is too large to travel."""
        try:
            self._send(Submit.of(self._name, request))
        except OverflowError:
            sentence = "a number in the request is out of range: token ids are 32-bit, priority is 64-bit"
            raise RequestError(sentence) from None

    def abort(self, request_ids: list[str]) -> None:
        self._send(Abort(request_ids))

    def close(self) -> None:
        """Say goodbye and end the thread."""
        self._closing.set()
        self._send(Bye(self._name))
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._drop_outbox(linger_ms=500)
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        with self._lock:
            if self._outbox is not None:
                with contextlib.suppress(zmq.Again):
                    self._outbox.send(messages.encode(message), zmq.NOBLOCK)

    def _run(self) -> None:
        epoch = 0
        while not self._closing.is_set():
            state = self._folder.read_state()
            if state is not None and state.failed is not None:
                self._receiver.on_failed(state.failed)
                return
            if state is None or state.epoch <= epoch:
                self._closing.wait(_LOOK_S)
                continue
            epoch = state.epoch
            self._attend(state)
            if not self._closing.is_set():
                self._receiver.on_down()

    def _attend(self, state: EngineState) -> None:
        """Talk to one engine process until it dies or the frontend closes."""
        inbox = self._context.socket(zmq.PULL)
        inbox.set(zmq.RCVHWM, 0)
        inbox.bind(self._folder.frontend_address(state.epoch))
        watch = ProcessWatch(state.pid)
        try:
            outbox = self._context.socket(zmq.PUSH)
            outbox.set(zmq.SNDHWM, 0)
            outbox.connect(self._folder.engine_address(state.epoch))
            with self._lock:
                self._outbox = outbox
            self._send(Hello(self._name, os.getpid(), self._folder.frontend_address(state.epoch)))
            self._receive(inbox, watch)
        finally:
            self._up.clear()
            if not self._closing.is_set():
                with self._lock:
                    self._drop_outbox(linger_ms=0)
            watch.close()
            inbox.close(linger=0)
            with contextlib.suppress(OSError):
                os.unlink(self._folder.frontend_address(state.epoch).removeprefix("ipc://"))

    def _receive(self, inbox: zmq.Socket[bytes], watch: ProcessWatch) -> None:
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        if watch.fd is not None:
            poller.register(watch.fd, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(_POLL_MS))
            while arrived := self._arrived(inbox):
                for data in arrived:
                    self._dispatch(data, pressed=len(arrived) > 1)
            if (watch.fd is None or watch.fd in ready) and watch.dead():
                return

    def _arrived(self, inbox: zmq.Socket[bytes]) -> list[bytes]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(inbox.recv(zmq.NOBLOCK))
        return messages

    def _dispatch(self, data: bytes, pressed: bool) -> None:
        self._heard = time.monotonic()
        message = messages.decode_to_frontend(data)
        if isinstance(message, Events):
            self._receiver.on_events(message.events, pressed)
        elif isinstance(message, Stats):
            self._receiver.on_stats(message)
        elif isinstance(message, Ready):
            self._up.set()
            self._receiver.on_ready(message.context)

    def _drop_outbox(self, linger_ms: int) -> None:
        if self._outbox is not None:
            self._outbox.close(linger=linger_ms)
            self._outbox = None
