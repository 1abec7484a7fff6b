"""Compiles kernels in other processes, so that Triton's Python front end runs on all cores at once.

A helper process imports what kernels import, while the engine's process imports torch, and then forks a child for each
kernel that it is sent. A child leaves machine code in Triton's cache on disk. The helper makes no CUDA context; it ends
when its socket closes, because the engine closed it or died, and its children end with it.

Nothing depends on its success: a kernel that was not compiled here is compiled by the process that needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

log = logging.getLogger(__name__)

_DEVICE = Path("/dev/nvidiactl")
# A child that takes longer than any compilation is ended.
_LIMIT_S = 120
_ID_BYTES = 4
_LARGEST = 1 << 20
_PR_SET_PDEATHSIG = 1  # prctl(2)


@contextlib.contextmanager
def helper(gpu: bool, processes: bool, environment: Mapping[str, str]) -> Iterator[Callable[[bytes], bool] | None]:
    """`CompileProcess.compile` of a helper that lives within the block; None where there is no use for one.

    gpu: the engine may take one. Whether there is one is asked of its device file, because torch is not imported yet.
    processes: kernels are to be compiled in other processes. environment: variables of the helper.
    """
    if not gpu or not _DEVICE.exists():
        yield None
        return
    threading.Thread(target=_hash_triton, name="triton-key", daemon=True).start()
    if not processes:
        yield None
        return
    try:
        process = CompileProcess(environment)
    except OSError as error:
        log.warning("kernels are compiled in threads, which takes longer: no process could be started: %s", error)
        yield None
        return
    try:
        yield process.compile
    finally:
        process.close()


def _hash_triton() -> None:
    """Have Triton work out its own key while torch is imported: a hash over its libraries, which takes the better part
    of a second."""
    with contextlib.suppress(ImportError):  # kernels are not what this engine runs on
        from triton.runtime.cache import triton_key

        triton_key()


class CompileProcess:
    """The engine's side of the helper. Starting it takes no time; what it is sent early waits until it is up."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # numpy's threads would stand in the way of forking
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            )
        self._lock = threading.Lock()
        self._answers: dict[int, Future[bool]] = {}
        self._count = 0
        self._gone = False
        self._reader = threading.Thread(target=self._read, name="compile-process", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, variant: bytes) -> bool:
        """Wait until a variant (`kernels.compilation.variant`) is compiled. False when it was not, whatever the reason.
        From any number of threads: as many are compiled at once."""
        answer: Future[bool] = Future()
        with self._lock:
            if self._gone:
                return False
            self._count += 1
            number = self._count
            self._answers[number] = answer
        with contextlib.suppress(OSError, TimeoutError):
            self._socket.send(number.to_bytes(_ID_BYTES, "little") + variant)
            return answer.result(2 * _LIMIT_S)
        return False

    def close(self) -> None:
        """End the helper, and by that its children: the system kills them with their parent."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while answer := self._socket.recv(_ID_BYTES + 1):
                number = int.from_bytes(answer[:_ID_BYTES], "little")
                with self._lock:
                    waiting = self._answers.pop(number)
                waiting.set_result(bool(answer[_ID_BYTES]))
        with self._lock:
            self._gone = True
            for waiting in self._answers.values():
                waiting.set_result(False)
            self._answers.clear()


class Helper:
    """The helper's side: one thread, because it forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._libc = ctypes.CDLL(None)

    def run(self) -> None:
        """Compile what comes until the other side is gone."""
        from kernels.compilation.variant import prepare

        prepare()
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._connection:
                    self._answer(key)
                elif message := self._connection.recv(_LARGEST):
                    self._start(message[:_ID_BYTES], message[_ID_BYTES:])
                else:
                    return

    def _start(self, number: bytes, data: bytes) -> None:
        """Fork a child that compiles. Its end of a pipe closes when it ends, however it does."""
        from kernels.compilation.variant import Variant

        alive, held = os.pipe()
        parent = os.getpid()
        try:
            variant = Variant.from_bytes(data)  # here, so that a module is imported once
            pid = os.fork()
        except Exception:  # it is no variant, or there are too many processes
            os.close(alive)
            os.close(held)
            self._say(number, False)
            return
        if pid == 0:
            self._compile(variant, parent)
        os.close(held)
        self._selector.register(alive, selectors.EVENT_READ, (pid, number))

    def _compile(self, variant: object, parent: int) -> NoReturn:
        """The whole life of a child."""
        status = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.alarm(_LIMIT_S)
            self._connection.close()
            if os.getppid() == parent:
                variant.compile()  # type: ignore[attr-defined]
                status = 0
        finally:
            os._exit(status)

    def _answer(self, key: selectors.SelectorKey) -> None:
        alive, (pid, number) = key.fd, key.data
        self._selector.unregister(alive)
        os.close(alive)
        _, status = os.waitpid(pid, 0)
        self._say(number, status == 0)

    def _say(self, number: bytes, compiled: bool) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, which the next turn sees
            self._connection.send(number + bytes([compiled]))


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # to the compilers that are run
    with contextlib.suppress(ConnectionError):
        Helper(connection).run()
    os._exit(0)  # children end by their own signal


if __name__ == "__main__":
    main()
