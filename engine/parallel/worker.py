"""A process that holds one rank beyond the first: builds its runner and follows. `LocalRanks` starts it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading

import msgspec

from engine.parallel.rendezvous import UNUSABLE, Assignment
from engine.parallel.ring import RingReader
from engine.plain import log_to_stderr

_BEAT_MS = 200
_PR_SET_PDEATHSIG = 1  # prctl(2)

log = logging.getLogger(__name__)


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it ends with the rank that started it, which may have work left
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    log_to_stderr(f"nereid rank {told.rank}: %(message)s")
    bell = socket.socket(fileno=told.bell)
    reader = RingReader(told.ring, bell, told.reader, told.readers)
    threading.Thread(target=_live, args=(reader, bell), name="nereid-beat", daemon=True).start()
    try:
        from engine.parallel.follower import follow
        from engine.parallel.start import runner_of

        follow(runner_of(told.config, told.rank, told.rendezvous), reader.messages())
    except Exception as error:
        log.exception("rank %d ends", told.rank)
        with contextlib.suppress(OSError):
            bell.send((str(error) or type(error).__name__).encode()[:4096])
        return UNUSABLE if isinstance(error, ValueError) else 1
    return 0


def _live(reader: RingReader, bell: socket.socket) -> None:
    """Say that this process runs, until the one that started it is gone."""
    poller = select.poll()
    poller.register(bell, select.POLLRDHUP)
    while not poller.poll(_BEAT_MS):
        reader.beat()
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads of communication libraries must not hold up the end
