"""Free a server that waits for a Python stub which is dead.

tritonserver 2.51 waits without a limit in two places, and with it every later load or unload of the model:

- for the first message of a stub that it has started, which says that its health can be watched. What the message holds
  is not looked at. So one is counted in the dead stub's place: the server goes on, finds that the stub is not healthy
  and ends the load with an error.
- for the stub to take what it has asked for (whether a request was cancelled, a metric, that a response was sent), by a
  flag under a condition. The instance cannot be ended before. So the flag is taken back in the dead stub's place.

And a dead instance that it ends first works off all requests that wait for the model, at a second each, where no
living one takes them: requests are refused in the dead stub's place.

A load that fails while another of its instances has just become ready may end the server (SIGSEGV): it destroys that
instance, whose own thread has not yet noted it (core r24.10, src/backend_model_instance.cc, StopBackendThread). A load
lasts as long as its slowest instance in any case, so a first word is better counted once the others are ready.

Source of the layouts: python_backend r24.10, src/pb_utils.h (IPCControlShm, SendMessageBase, ResponseSenderBase,
ResponseBatch), src/ipc_message.h (IPCMessageShm), src/pb_string.h (StringShm), src/message_queue.h (MessageQueueShm),
src/shm_manager.h (16 bytes in front of each object); for conditions glibc 2.25 to 2.40, nptl/pthread_cond_wait.c.
Memory is held against what it must show, and left alone when it differs, as it may in other versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from engine.serving.launch.guard import SHARED_MEMORY

_OWNERSHIP = 16  # bytes in front of each object: its reference count
_QUEUES = struct.Struct("<96xqqq")  # of IPCControlShm: of answers, of what the stub asks, and of what it is told beside
# MessageQueueShm: two semaphores of 32 bytes (free and used places), a mutex, places, handle of the buffer, head, tail.
_QUEUE = struct.Struct("<I28xI28x40xQqii")
_USED, _HEAD = 32, 120  # offsets of the semaphore of used places, and of the head
_MAX_PLACES = 1 << 20
_MESSAGE = struct.Struct("<I12xi4xq")  # references, command, handle of what the message holds
_WORDS_OF_A_START = 2  # answers of a stub that is ready: that it can be watched, and that its model is initialized
# ResponseSend, LogRequest, the six of metrics and their families, load, unload and readiness, IsRequestCancelled
_ANSWERED = frozenset({12, 16, *range(19, 31)})
# What such a message holds: references, a mutex of 40 bytes, a condition of 48 that ends with the count of those who
# wait and two words on which they do (__wrefs, __g_signals), and whether it is the stub's turn.
_HELD = struct.Struct("<I12x40x36xIII?")
_WORDS, _TURN = _OWNERSHIP + 80, _OWNERSHIP + 88
_SHARED, _ONE_WAITER, _ONE_SIGNAL = 1, 8, 2
# An answer that is an error: references, IPCMessageShm (48 bytes), and of ResponseBatch the error's handle, whether
# there is one, and whether it has a text. Behind it the text: references, handle and length; references, characters.
_REFUSAL = struct.Struct("<I12x48x96xq?x?13x")
_TEXT, _CHARACTERS = struct.Struct("<I12xqQ"), struct.Struct("<I12x")
_REFUSALS = 64  # that wait at once; the server takes them as fast as it has requests
_REFUSAL_BYTES = 1024
_SYS_FUTEX, _FUTEX_WAKE = 202, 1  # of x86-64, as the layouts are


def release(region: str, control: int) -> bool:
    """Do in a dead stub's place what the server waits for. Whether its memory is still there: the server may begin
    another wait as long as it is.

    region, control: the stub's shared memory and the handle of its control block, as in its command line.
    """
    with _memory(region) as memory:
        if memory is None:
            return False  # the server has given it up already
        _free(memory, control)
        return True


def starts(region: str, control: int) -> bool:
    """Whether a stub has not yet told the server that its model is initialized. False where nobody can tell."""
    with _memory(region) as memory:
        at = None if memory is None else _answers(memory, control)
        if memory is None or at is None:
            return False
        *_, head, _ = _QUEUE.unpack_from(memory, at)
        return bool(head < _WORDS_OF_A_START)


def refuse(region: str, control: int, sentence: str) -> None:
    """Answer, in a dead stub's place, the next requests that the server has for it with an error."""
    with _memory(region) as memory:
        at = None if memory is None else _answers(memory, control)
        if memory is None or at is None:
            return
        message = _write_refusal(memory, control, sentence.encode()[: _REFUSAL_BYTES // 2])
        if message is None:
            return
        _, used, places, buffer, head, _ = _QUEUE.unpack_from(memory, at)
        for _ in range(used, min(_REFUSALS, places)):
            if _semaphore("sem_trywait", memory, at) != 0:
                return
            struct.pack_into("<q", memory, buffer + _OWNERSHIP + 8 * head, message)
            head = (head + 1) % places
            struct.pack_into("<i", memory, at + _HEAD, head)
            _semaphore("sem_post", memory, at + _USED)


def _write_refusal(memory: mmap.mmap, control: int, text: bytes) -> int | None:
    """The handle of an error, where nobody reads or allocates: at the end of the queue of what the stub is told beside
    its requests. Its references never end, so it stays. None where that queue is not as it is known."""
    at = _queue(memory, control, 2)
    if at is None:
        return None
    _, _, places, buffer, head, _ = _QUEUE.unpack_from(memory, at)
    if 8 * (places - head) < 2 * _REFUSAL_BYTES:
        return None
    message = int(buffer + _OWNERSHIP + 8 * places - _REFUSAL_BYTES) & -_OWNERSHIP
    told = message + _REFUSAL.size + -_REFUSAL.size % _OWNERSHIP
    characters = told + _TEXT.size
    _REFUSAL.pack_into(memory, message, 1, told, True, True)
    _TEXT.pack_into(memory, told, 1, characters, len(text))
    _CHARACTERS.pack_into(memory, characters, 1)
    memory[characters + _CHARACTERS.size : characters + _CHARACTERS.size + len(text)] = text
    return message


@contextlib.contextmanager
def _memory(region: str) -> Iterator[mmap.mmap | None]:
    """A stub's shared memory; None when it is gone."""
    try:
        descriptor = os.open(SHARED_MEMORY / Path(region).name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        with mmap.mmap(descriptor, 0) as memory:
            yield memory
    finally:
        os.close(descriptor)


def _answers(memory: mmap.mmap, control: int) -> int | None:
    """Where the queue of answers is; None in memory that is not laid out as it is known."""
    return _queue(memory, control, 0)


def _queue(memory: mmap.mmap, control: int, number: int) -> int | None:
    """Where a queue of _QUEUES is; None in memory that is not laid out as it is known."""
    try:
        at = int(_QUEUES.unpack_from(memory, control + _OWNERSHIP)[number]) + _OWNERSHIP
        free, used, places, buffer, head, tail = _QUEUE.unpack_from(memory, at)
    except struct.error:
        return None
    known = 0 < places <= _MAX_PLACES and 0 <= head < places and 0 <= tail < places and at % 8 == 0
    known = known and free + used <= places + 1  # one more where a word was counted that was never put in
    return at if known and 0 < buffer < len(memory) - _OWNERSHIP - 8 * places else None


def _free(memory: mmap.mmap, control: int) -> None:
    try:
        answers, requests, _ = _QUEUES.unpack_from(memory, control + _OWNERSHIP)
        _count(memory, answers + _OWNERSHIP)
        _take_turns(memory, requests + _OWNERSHIP)
    except struct.error:
        return  # not the layout that is known


def _count(memory: mmap.mmap, at: int) -> None:
    """Count a message in the queue at `at`, if there never was one."""
    free, used, places, _, head, tail = _QUEUE.unpack_from(memory, at)
    if 0 < places <= _MAX_PLACES and free == places and used == head == tail == 0 and at % 8 == 0:
        _semaphore("sem_post", memory, at + _USED)


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


def _semaphore(call: str, memory: mmap.mmap, at: int) -> int:
    there = ctypes.c_char.from_buffer(memory, at)
    try:
        return int(getattr(ctypes.CDLL(None), call)(ctypes.byref(there)))
    finally:
        del there  # the memory cannot be given back while it is held


def _wake(memory: mmap.mmap, at: int) -> None:
    there = ctypes.c_char.from_buffer(memory, at)
    try:
        ctypes.CDLL(None).syscall(_SYS_FUTEX, ctypes.byref(there), _FUTEX_WAKE, ctypes.c_int(2**31 - 1), None, None, 0)
    finally:
        del there
