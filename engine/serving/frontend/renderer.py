"""Chat templates are rendered in processes of their own, which are killed when they take too long.

Jinja's sandbox bounds range() and nothing else: loops in loops go on for ever, a product of texts takes all memory. A
process has a limit of memory and the one that asks a limit of time, whatever the template and the messages do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from engine import env, interpreter
from engine.serving.link import protocol
from engine.text import ChatTemplate
from engine.types import ErrorCode, RequestError, shown

logger = logging.getLogger("nereid.renderer")

RENDER_S = 3.0  # a template of a long conversation takes milliseconds
_START_S = 20.0  # imports and the template's compilation
_END_S = 1.0  # for a process whose connection has ended to be gone
_PROCESSES = 4  # at once: while one renders in vain the others go on
_SPARE_S = 60.0  # that one has had nothing to do, after which it ends; the last one stays
_MEMORY = 1 << 30  # address space of a process; 40 MB of it are Python's and Jinja's
_MAX_TEXT_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1  # prctl(2)
_FIELDS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})

_NO_TEMPLATE = "this checkpoint has no chat template: send text_input"
_SLOW = "the chat template took more than {most_s:g} s for these messages"
_ENDED = "the chat template ended the process that rendered these messages: they need too much of it"


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a process says: of a rendering its text (UTF-8, surrogates passed), at its start nothing, or what is wrong.

    found: whether the checkpoint has a chat template.
    """

    text: bytes = b""
    error: str | None = None
    code: ErrorCode = ErrorCode.INVALID_ARG
    found: bool = True


class Renderer:
    """Renders with the template of a checkpoint folder, or with the one in `file`. Safe to use from any thread, which
    must outlive the renderer.

    most_s: longest that one rendering takes. Raises RequestError when the template is broken.
    """

    def __init__(
        self, folder: Path, most_s: float = RENDER_S, processes: int = _PROCESSES, file: Path | None = None
    ) -> None:
        self._source = (folder, file)
        self._most_s = most_s
        self._free = threading.Semaphore(processes)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        first = _Process(*self._source)
        self.found = first.start()
        if self.found:
            self._idle.append(first)
        else:
            first.kill()

    def render(self, messages: bytes, parameters: bytes | None) -> str:
        """The prompt of a conversation. messages: a JSON list. parameters: a JSON object of the template's variables.

        Raises RequestError on what cannot be rendered, or not within the limits.
        """
        if not self.found:
            raise RequestError(_NO_TEMPLATE, ErrorCode.UNSUPPORTED)
        if not self._free.acquire(timeout=self._most_s):
            raise RequestError(
                "other conversations have kept the chat template busy; try again later", ErrorCode.UNAVAILABLE
            )
        try:
            return self._render(messages, parameters)
        finally:
            self._free.release()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().kill()

    def _render(self, messages: bytes, parameters: bytes | None) -> str:
        request = msgspec.msgpack.encode((messages, parameters))
        answer = self._asked(request) or self._asked(request)
        if answer is None:
            raise RequestError(_ENDED)
        if answer.error is not None:
            raise RequestError(answer.error, answer.code)
        return answer.text.decode("utf-8", "surrogatepass")

    def _asked(self, request: bytes) -> Answer | None:
        """None when somebody else has killed the process meanwhile. Raises RequestError."""
        process = self._take()
        try:
            return process.ask(request, self._most_s)
        except OSError as error:  # TimeoutError is one
            late = isinstance(error, TimeoutError)
            killed = not late and process.killed()
            process.kill()
            process = _Process(*self._source)  # it starts while nobody waits for it
            if killed:
                return None
            raise RequestError(_SLOW.format(most_s=self._most_s) if late else _ENDED) from None
        finally:
            self._put_back(process)

    def _put_back(self, process: _Process) -> None:
        """What was taken last is taken first, so that spare ones come to stand at the front."""
        process.used = time.monotonic()
        spare: _Process | None = None
        with self._lock:
            self._idle.append(process)
            if len(self._idle) > 1 and process.used - self._idle[0].used > _SPARE_S:
                spare = self._idle.pop(0)
        if spare is not None:
            spare.kill()

    def _take(self) -> _Process:
        """A process that lives and has read the template. Raises RequestError when none can be started."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else _Process(*self._source)
            if not process.dead():
                process.start()
                return process
            process.kill()


class _Process:
    """The asking side of one process. used: when it was last given back. Raises RequestError where there is none."""

    def __init__(self, folder: Path, file: Path | None) -> None:
        self.used = 0.0
        self._socket, theirs = socket.socketpair()
        self._started = False
        with theirs:
            words = ["-m", __name__, str(theirs.fileno()), str(os.getpid()), str(folder)]
            try:
                self._child = interpreter.start(
                    words if file is None else [*words, str(file)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C in the server's terminal is the server's business
                    env=env.inherited(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                )
            except OSError as error:
                self._socket.close()
                raise RequestError(
                    f"no process for the chat template could be started: {error.strerror}", ErrorCode.UNAVAILABLE
                ) from None

    def start(self) -> bool:
        """Wait until the template is read; whether there is one. Raises RequestError."""
        if self._started:
            return True
        try:
            answer = msgspec.msgpack.decode(_receive(self._socket, time.monotonic() + _START_S), type=Answer)
        except OSError:
            self.kill()
            raise RequestError("the chat template cannot be read: it takes too much time or memory") from None
        if answer.error is not None:
            self.kill()
            raise RequestError(answer.error, answer.code)
        self._started = True
        return answer.found

    def ask(self, request: bytes, most_s: float) -> Answer:
        """Raises OSError when it has died, TimeoutError when it takes longer than `most_s`."""
        end = time.monotonic() + most_s
        _send(self._socket, request, end)
        return msgspec.msgpack.decode(_receive(self._socket, end), type=Answer)

    def dead(self) -> bool:
        return self._child.poll() is not None

    def killed(self) -> bool:
        """Whether SIGKILL has ended it, which no template does: they meet a MemoryError."""
        try:
            return self._child.wait(_END_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._socket.close()


def has_template(folder: Path) -> bool:
    """Whether a checkpoint has a chat template. Raises RequestError when it is broken."""
    made = Renderer(folder)
    made.close()
    return made.found


def _send(connection: socket.socket, data: bytes, end: float) -> None:
    connection.settimeout(max(1e-3, end - time.monotonic()))
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive(connection: socket.socket, end: float | None = None) -> bytes:
    """One message. Raises OSError when the other side has gone, TimeoutError at `end`."""
    head = _receive_bytes(connection, 8, end)
    return _receive_bytes(connection, struct.unpack("<Q", head)[0], end)


def _receive_bytes(connection: socket.socket, count: int, end: float | None) -> bytes:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        connection.settimeout(None if end is None else max(1e-3, end - time.monotonic()))
        got = connection.recv_into(view[done:])
        if not got:
            raise ConnectionResetError
        done += got
    return bytes(data)


def answer(template: ChatTemplate, messages: bytes, parameters: bytes | None) -> Answer:
    """Render in this process, with the template that the parameters bring, if they bring one."""
    try:
        fields = {} if parameters is None else _json(parameters, protocol.TEMPLATE_PARAMETERS, dict)
        own = fields.pop("chat_template", None)
        if own is not None:
            if not isinstance(own, str):
                raise RequestError("chat_template must be a string, the source of a template")
            template = template.replaced(own)
        known = {name: value for name, value in fields.items() if name in _FIELDS}
        more = {name: value for name, value in fields.items() if name not in _FIELDS}
        chat = _json(messages, protocol.MESSAGES, list)
        text = template.render(chat, template_kwargs=more, **known).encode("utf-8", "surrogatepass")
    except RequestError as error:
        return Answer(error=error.message, code=error.code)
    except MemoryError:
        return Answer(error=_ENDED)
    if len(text) > _MAX_TEXT_BYTES:
        return Answer(
            error=f"the chat template made a text of {len(text)} bytes; at most {_MAX_TEXT_BYTES} are allowed"
        )
    return Answer(text)


def _json(raw: bytes, name: str, kind: type[Any]) -> Any:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {shown(str(error))}") from None
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a JSON {'list' if kind is list else 'object'}")
    return value


def main(arguments: list[str]) -> None:
    """A process: read the template, say how that went, then render what comes until the other side has gone."""
    descriptor, parent, *source = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(descriptor))
    template, said = None, Answer(found=False)
    try:
        template = ChatTemplate.from_folder(*source)
        said = Answer(found=template is not None)
    except RequestError as error:
        said = Answer(error=error.message, code=error.code)
    with contextlib.suppress(ConnectionError):
        _reply(connection, said)
        while template is not None:
            _reply(connection, answer(template, *msgspec.msgpack.decode(_receive(connection))))


def _reply(connection: socket.socket, said: Answer) -> None:
    data = msgspec.msgpack.encode(said)
    connection.settimeout(None)
    connection.sendall(struct.pack("<Q", len(data)) + data)


if __name__ == "__main__":
    main(sys.argv[1:])
