"""Free a server that waits for a Python stub which is dead.

tritonserver 2.51 waits without a limit in two places, and with it every later load or unload of the model:

- for the first message of a stub that it has started, which says that its health can be watched. What the message holds
  is not looked at. So one is counted in the dead stub's place: the server goes on, finds that the stub is not healthy
  and ends the load with an error.
- for the stub to take what it has asked for (whether a request was cancelled, a metric, that a response was sent), by a
  flag under a condition. The instance cannot be ended before. So the flag is taken back in the dead stub's place.

Source of the layouts: python_backend r24.10, src/pb_utils.h (IPCControlShm, SendMessageBase, ResponseSenderBase),
src/ipc_message.h (IPCMessageShm), src/message_queue.h (MessageQueueShm), src/shm_manager.h (16 bytes in front of each
object); for conditions glibc 2.25 to 2.40, nptl/pthread_cond_wait.c. Memory is held against what it must show, and left
alone when it differs, as it may in other versions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path

from engine.serving.launch.guard import SHARED_MEMORY

_OWNERSHIP = 16  # bytes in front of each object: its reference count
_QUEUES = struct.Struct("<96xqq")  # of IPCControlShm: queues of answers, and of what the stub asks
# MessageQueueShm: two semaphores of 32 bytes (free and used places), a mutex, places, handle of the buffer, head, tail.
_QUEUE = struct.Struct("<I28xI28x40xQqii")
_USED = 32  # offset of the semaphore of used places
_MAX_PLACES = 1 << 20
_MESSAGE = struct.Struct("<I12xi4xq")  # references, command, handle of what the message holds
# ResponseSend, LogRequest, the six of metrics and their families, load, unload and readiness, IsRequestCancelled
_ANSWERED = frozenset({12, 16, *range(19, 31)})
# What such a message holds: references, a mutex of 40 bytes, a condition of 48 that ends with the count of those who
# wait and two words on which they do (__wrefs, __g_signals), and whether it is the stub's turn.
_HELD = struct.Struct("<I12x40x36xIII?")
_WORDS, _TURN = _OWNERSHIP + 80, _OWNERSHIP + 88
_SHARED, _ONE_WAITER, _ONE_SIGNAL = 1, 8, 2
_SYS_FUTEX, _FUTEX_WAKE = 202, 1  # of x86-64, as the layouts are


def release(region: str, control: int) -> bool:
    """Do in a dead stub's place what the server waits for. Whether its memory is still there: the server may begin
    another wait as long as it is.

    region, control: the stub's shared memory and the handle of its control block, as in its command line.
    """
    try:
        descriptor = os.open(SHARED_MEMORY / Path(region).name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # the server has given it up already
    try:
        with mmap.mmap(descriptor, 0) as memory:
            _free(memory, control)
    finally:
        os.close(descriptor)
    return True


def _free(memory: mmap.mmap, control: int) -> None:
    try:
        answers, requests = _QUEUES.unpack_from(memory, control + _OWNERSHIP)
        _count(memory, answers + _OWNERSHIP)
        _take_turns(memory, requests + _OWNERSHIP)
    except struct.error:
        return  # not the layout that is known


def _count(memory: mmap.mmap, at: int) -> None:
    """Count a message in the queue at `at`, if there never was one."""
    free, used, places, _, head, tail = _QUEUE.unpack_from(memory, at)
    if 0 < places <= _MAX_PLACES and free == places and used == head == tail == 0 and at % 8 == 0:
        _post(memory, at + _USED)


def _take_turns(memory: mmap.mmap, at: int) -> None:
    """Take back the flag of each message of the queue at `at` that the server waits for the stub with."""
    _, _, places, buffer, _, _ = _QUEUE.unpack_from(memory, at)
    if not 0 < places <= _MAX_PLACES:
        return
    for message in set(struct.unpack_from(f"<{places}q", memory, buffer + _OWNERSHIP)):
        try:
            references, command, held = _MESSAGE.unpack_from(memory, message)
            if message <= 0 or held <= 0 or held % 8 or not references or command not in _ANSWERED:
                continue
            references, waiting, *signals, turn = _HELD.unpack_from(memory, held)
        except struct.error:
            continue  # a place that was used before, for something else now
        if references and turn and waiting & _SHARED and waiting >= _ONE_WAITER:
            memory[held + _TURN] = 0
            _signal(memory, held + _WORDS, signals)


def _signal(memory: mmap.mmap, at: int, signals: list[int]) -> None:
    """Wake who waits on the condition with these two words. Its own function would wait for the dead as well, which is
    counted among those that are to wake."""
    for word, count in enumerate(signals):
        struct.pack_into("<I", memory, at + 4 * word, count + _ONE_SIGNAL & 0xFFFFFFFF)
        _wake(memory, at + 4 * word)


def _post(memory: mmap.mmap, at: int) -> None:
    there = ctypes.c_char.from_buffer(memory, at)
    try:
        ctypes.CDLL(None).sem_post(ctypes.byref(there))
    finally:
        del there  # the memory cannot be given back while it is held


def _wake(memory: mmap.mmap, at: int) -> None:
    there = ctypes.c_char.from_buffer(memory, at)
    try:
        ctypes.CDLL(None).syscall(_SYS_FUTEX, ctypes.byref(there), _FUTEX_WAKE, ctypes.c_int(2**31 - 1), None, None, 0)
    finally:
        del there
