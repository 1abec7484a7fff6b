"""One writer, several readers, on one host: messages through shared memory.

A ring of bytes behind a few counters of 64 bits; messages stand in it one after another, each behind its length. A
socket a reader is the doorbell: a byte says that there is something to read, and its end that the other side is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

RING_BYTES = 4 << 20
_LENGTH = struct.Struct("<Q")
_WAIT_S = 0.0002  # between looks at a ring without room
# Counters: bytes written, then of each reader bytes read, messages done, and when it was last alive (monotonic, ns).
_OWN = 3


class RingClosed(Exception):
    """The other side is gone."""


def _counters(readers: int) -> int:
    return 1 + _OWN * readers


class _Memory:
    def __init__(self, descriptor: int, readers: int) -> None:
        self._map = mmap.mmap(descriptor, _counters(readers) * 8 + RING_BYTES)
        view = memoryview(self._map)
        self.counters = view[: _counters(readers) * 8].cast("q")
        self.data = view[_counters(readers) * 8 :]

    def close(self) -> None:
        self.counters.release()
        self.data.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class RingWriter:
    """`send` and `close` are for one thread, what asks about readers for any."""

    def __init__(self, readers: int, given_up: Callable[[], bool]) -> None:
        """given_up: whether readers that make no room are waited for in vain."""
        self._readers = readers
        self._given_up = given_up
        self.descriptor = os.memfd_create("nereid-plans", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _counters(readers) * 8 + RING_BYTES)
        self._memory = _Memory(self.descriptor, readers)
        pairs = [socket.socketpair() for _ in range(readers)]
        self._bells, self.theirs = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
        self.sent = 0

    def bell(self, reader: int) -> socket.socket:
        return self._bells[reader]

    def send(self, message: bytes) -> None:
        """Raises RingClosed when readers were given up while it waited for room."""
        self.sent += 1
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        counters = self._memory.counters
        while rest:
            at = counters[0]
            room = RING_BYTES - (at - min(counters[1 + _OWN * i] for i in range(self._readers)))
            if not room:
                if self._given_up():
                    raise RingClosed("the ranks that follow take no more plans")
                time.sleep(_WAIT_S)
                continue
            place = at % RING_BYTES
            part = rest[: min(room, RING_BYTES - place)]
            self._memory.data[place : place + len(part)] = part
            counters[0] = at + len(part)
            rest = rest[len(part) :]
            self._ring()

    def _ring(self) -> None:
        for bell in self._bells:
            # One that is full was rung, and one that is broken has a watch of its own.
            with contextlib.suppress(OSError):
                bell.send(b"\0", socket.MSG_DONTWAIT)

    def done(self, reader: int) -> int:
        """Messages that a reader has dealt with."""
        return self._memory.counters[1 + _OWN * reader + 1]

    def silent_s(self, reader: int) -> float | None:
        """Seconds since a reader was last alive; None before the first time."""
        beat = self._memory.counters[1 + _OWN * reader + 2]
        return (time.monotonic_ns() - beat) / 1e9 if beat else None

    def close(self) -> None:
        for bell in (*self._bells, *self.theirs):
            bell.close()
        self._memory.close()
        os.close(self.descriptor)


class RingReader:
    """Reader `index` of `readers`, in the process that was given the writer's descriptors."""

    def __init__(self, descriptor: int, bell: socket.socket, index: int, readers: int) -> None:
        self._memory = _Memory(descriptor, readers)
        self._at = 1 + _OWN * index
        self._bell = bell
        self._held = bytearray()

    def messages(self) -> Iterator[bytes]:
        """Messages in order, as they come; the one before is dealt with when the next is asked for. Ends when the
        writer is gone."""
        counters = self._memory.counters
        while self._bell.recv(1 << 12):
            while (at := counters[self._at]) < counters[0]:
                place = at % RING_BYTES
                part = self._memory.data[place : place + min(counters[0] - at, RING_BYTES - place)]
                self._held += part
                counters[self._at] = at + len(part)
                for message in self._whole():
                    yield message
                    counters[self._at + 1] += 1

    def _whole(self) -> Iterator[bytes]:
        while len(self._held) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._held)[0]
            if len(self._held) < end:
                return
            message = bytes(self._held[_LENGTH.size : end])
            del self._held[:end]
            yield message

    def beat(self) -> None:
        """Say that this process is alive, from any thread."""
        self._memory.counters[self._at + 2] = time.monotonic_ns()
