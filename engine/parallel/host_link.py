"""What the first host and another say to each other over TCP: steps as bytes, the rest as small messages.

A frame is one byte that says which of the two it is, four bytes of length, and the content, which is msgspec's coding
of plain numbers and text: nothing that comes over a network is run. Neither side keeps what the other does not take:
a sender waits for room in the socket.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time

import msgspec

from engine.config import EngineConfig

_HEAD = struct.Struct("<BI")
_SAID, _STEP = 0, 1
_READ_BYTES = 1 << 20
_WAIT_MS = 100
# A step starts rows with all of their tokens; settings and sentences are short.
MAX_STEP_BYTES = 1 << 30
MAX_SAID_BYTES = 1 << 17
MAX_SENTENCE = 4096
BEAT_S = 0.5
# Hosts are started one after another, and read for different lengths of time.
MEET_S = 600.0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first word of another host: what it is, and runs."""

    host: int
    hosts: int
    code: str
    packages: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The host is taken. model: what `identity.model` says of the model; store: the port where ranks meet."""

    config: EngineConfig
    model: str
    store: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The host is not taken; lasting: nor would it be if it came again."""

    sentence: str
    lasting: bool


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The host has the model, and starts its ranks. From now on the group ends when it does."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The process runs."""


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Why the group ends, as far as this side knows; lasting: it would again."""

    sentence: str
    lasting: bool = False


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The engine was told to end."""


Said = Hello | Welcome | Refused | Joined | Beat | Fault | Goodbye
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Said).decode


class LinkError(Exception):
    """The other side does not say what it should; the connection is of no use any more."""


class Link:
    """One end of a connection. `receive` is for one thread, all else for any.

    heard: when the other side said something last (monotonic seconds). ended: nothing comes from it any more.
    """

    def __init__(self, connected: socket.socket, max_step: int = 0) -> None:
        """max_step: most bytes of a step that is taken."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer: str = connected.getpeername()[0]
        self.own: str = connected.getsockname()[0]
        self.heard = time.monotonic()
        self.ended = False
        self._socket = connected
        self._max_step = max_step
        self._lock = threading.Lock()
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, message: Said) -> None:
        """A message to a side that is gone is dropped."""
        data = _encode(message)
        with self._lock:
            self._push(_HEAD.pack(_SAID, len(data)) + data)

    def mention(self, message: Said, wait_s: float = 0.0) -> None:
        """Say it if that can be done within `wait_s`."""
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            # A socket with room takes a short message whole.
            if poller.poll(wait_s * 1000):
                data = _encode(message)
                self._push(_HEAD.pack(_SAID, len(data)) + data)
        finally:
            self._lock.release()

    def send_step(self, step: bytes) -> None:
        """Waits for room until the link ends."""
        if len(step) > MAX_STEP_BYTES:
            raise LinkError(f"a step of {len(step)} bytes is too long for a link, which takes {MAX_STEP_BYTES}")
        with self._lock:
            self._push(_HEAD.pack(_STEP, len(step)) + step)

    def _push(self, data: bytes) -> None:
        left = memoryview(data)
        poller = select.poll()
        while left and not self.ended:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                poller.register(self._socket, select.POLLOUT)
                poller.poll(_WAIT_MS)
            except OSError:
                # What the other side said before it went is still to be read.
                return

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive within `timeout_s`."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def receive(self) -> list[Said | bytes]:
        """What has come: messages, and steps as bytes. Raises LinkError for what is no frame, or too long."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        self.heard = time.monotonic()
        self._read += data
        found = []
        while len(self._read) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._read)
            most = {_SAID: MAX_SAID_BYTES, _STEP: self._max_step}.get(kind, 0)
            if length > most:
                raise LinkError(f"{self.peer} sends what is no message of ranks, or one of {length} bytes")
            end = _HEAD.size + length
            if len(self._read) < end:
                break
            content = bytes(self._read[_HEAD.size : end])
            del self._read[:end]
            found.append(content if kind == _STEP else self._decoded(content))
        return found

    def _decoded(self, content: bytes) -> Said:
        try:
            said: Said = _decode(content)
        except msgspec.MsgspecError as error:
            raise LinkError(f"{self.peer} sends what is no message of ranks: {str(error)[:200]}") from None
        return said

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def sentence_of(text: str) -> str:
    """At most so long as a message may be."""
    return text[:MAX_SENTENCE]
