"""Messages between two processes over a Unix stream socket: four bytes of length, then the message.

A message that the socket takes at once wakes the one who waits for it and no thread in between. What the socket does
not take stays here and goes out from a thread of its own, so that nobody who sends ever waits.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_READ_BYTES = 1 << 16
_LOOK_MS = 50


class Pipe:
    """One end of a connection. `send` is for any thread, `receive` for one.

    ended: the other side is gone, and all that came from it has been received.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.ended = False
        self._socket = connected
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self._flusher: threading.Thread | None = None
        self._closed = False
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> int:
        """The pid of the process that made the other end (SO_PEERCRED, unix(7))."""
        held = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(held)[0]
        return pid

    def send(self, message: bytes) -> None:
        """Hand a message over. One to a side that is gone is dropped."""
        data = memoryview(_LENGTH.pack(len(message)) + message)
        with self._lock:
            if self._closed:
                return
            if not self._waiting:
                data = self._push(data)
            if not data:
                return
            self._waiting.append(data)
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="nereid-pipe", daemon=True)
                self._flusher.start()

    def receive(self) -> list[bytes]:
        """Messages that are here as a whole; does not wait."""
        read, messages, at = self._read, [], 0
        try:
            while len(data := self._socket.recv(_READ_BYTES)) == _READ_BYTES:
                read += data
            read += data
            self.ended = not data
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        while (start := at + _LENGTH.size) <= len(read):
            (length,) = _LENGTH.unpack_from(read, at)
            if start + length > len(read):
                break
            at = start + length
            messages.append(bytes(read[start:at]))
        del read[:at]
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Close, after what still waits has gone out or `linger_s` seconds have passed."""
        until = time.monotonic() + linger_s
        while self._waiting and time.monotonic() < until:
            time.sleep(0.001)
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._socket.close()

    def _push(self, data: memoryview) -> memoryview:
        """Send what the socket takes now; what is left."""
        try:
            while data:
                data = data[self._socket.send(data, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError:
            return data[:0]
        return data

    def _flush(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while True:
            poller.poll(_LOOK_MS)
            with self._lock:
                while self._waiting and not self._closed:
                    left = self._push(self._waiting[0])
                    if left:
                        self._waiting[0] = left
                        break
                    self._waiting.popleft()
                if not self._waiting:
                    self._flusher = None
                    return
