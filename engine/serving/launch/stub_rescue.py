"""Free a server that waits for a Python stub which died before its first word.

tritonserver 2.51 starts a stub and waits, without a limit, for the message that says that its health can be watched; a
stub that is killed before has the load wait for ever, and with it every later load or unload of the model. What the
message holds is not looked at. So one is counted in the dead stub's place: the server goes on, finds that the stub is
not healthy and ends the load with an error.

Source of the layout: python_backend r24.10, src/pb_utils.h (IPCControlShm), src/message_queue.h (MessageQueueShm),
src/shm_manager.h (16 bytes in front of each object). It is held against what a queue that nothing was ever put into
must show, and left alone when it differs, as it may in other versions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path

from engine.serving.launch.guard import SHARED_MEMORY

_OWNERSHIP = 16  # bytes in front of each object: its reference count
_PARENT_QUEUE = struct.Struct("<96xq")  # of IPCControlShm: the handle of the queue to the server
# MessageQueueShm: two semaphores of 32 bytes (free and used places), a mutex, places, handle of the buffer, head, tail.
_QUEUE = struct.Struct("<I28xI28x40xQqii")
_USED = 32  # offset of the semaphore of used places
_MAX_PLACES = 1 << 20


def release(region: str, control: int) -> bool:
    """Count a message to the server in the queue of a dead stub, if there never was one. Whether that was done.

    region, control: the stub's shared memory and the handle of its control block, as in its command line.
    """
    try:
        descriptor = os.open(SHARED_MEMORY / Path(region).name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # the server has given it up already
    try:
        with mmap.mmap(descriptor, 0) as memory:
            return _count(memory, control)
    finally:
        os.close(descriptor)


def _count(memory: mmap.mmap, control: int) -> bool:
    try:
        (handle,) = _PARENT_QUEUE.unpack_from(memory, control + _OWNERSHIP)
        at = handle + _OWNERSHIP
        free, used, places, _, head, tail = _QUEUE.unpack_from(memory, at)
    except struct.error:
        return False
    if not (0 < places <= _MAX_PLACES and free == places and used == head == tail == 0 and at % 8 == 0):
        return False
    semaphore = ctypes.c_char.from_buffer(memory, at + _USED)
    try:
        return ctypes.CDLL(None).sem_post(ctypes.byref(semaphore)) == 0
    finally:
        del semaphore  # the memory cannot be given back while it is held
