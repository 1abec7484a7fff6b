"""What a server waits for with a dead stub is done in the stub's place, and nothing else in its memory is touched.

This process is the server: a thread of it waits on a condition in a region that is laid out as 2.51's.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from engine.serving.launch import stub_rescue
from engine.serving.launch.guard import SHARED_MEMORY

LIBC = ctypes.CDLL(None)
CONTROL, ANSWERS, REQUESTS, BUFFER, MESSAGE, HELD = 0x100, 0x200, 0x300, 0x400, 0x800, 0x900
TOLD, TOLD_BUFFER, TOLD_PLACES, SIZE = 0xA00, 0x1000, 1000, 0x4000  # of what a stub is told beside its requests
HEAD = 16  # in front of each object
PLACES = 8
CANCELLED, CLEANUP = 30, 18  # commands: one that the stub has to take the answer of, one that it has not
PROCESS_SHARED = 1


class Region:
    """Shared memory of a stub that has asked something of the server, by a message in its queue."""

    def __init__(self, command: int = CANCELLED, waiting: bool = True) -> None:
        self.name = f"stub-rescue-{uuid.uuid4().hex[:8]}"
        self._file = SHARED_MEMORY / self.name
        self._file.write_bytes(bytes(SIZE))
        with self._file.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        struct.pack_into("<qqq", self.memory, CONTROL + HEAD + 96, ANSWERS, REQUESTS, TOLD)
        struct.pack_into("<I28xI28x40xQqii", self.memory, TOLD + HEAD, TOLD_PLACES, 0, TOLD_PLACES, TOLD_BUFFER, 0, 0)
        for queue, head in ((ANSWERS, 1), (REQUESTS, 1)):  # one message was put in, and taken out
            struct.pack_into("<I28xI28x40xQqii", self.memory, queue + HEAD, PLACES, 0, PLACES, BUFFER, head, head)
        struct.pack_into("<q", self.memory, BUFFER + HEAD, MESSAGE)
        struct.pack_into("<I12xi4xq", self.memory, MESSAGE, 1, command, HELD)
        struct.pack_into("<I", self.memory, HELD, 1)
        shared = ctypes.create_string_buffer(64)
        for kind, at in (("mutex", 0), ("cond", 40)):
            getattr(LIBC, f"pthread_{kind}attr_init")(shared)
            getattr(LIBC, f"pthread_{kind}attr_setpshared")(shared, PROCESS_SHARED)
            getattr(LIBC, f"pthread_{kind}_init")(self._at(at), shared)
        self.freed = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)
        if waiting:
            self.wait()

    def wait(self) -> None:
        """Have the server wait, one more than do already."""
        before = self.waiters()
        self._thread.start()
        while self.waiters() == before:
            time.sleep(0.01)

    def _at(self, offset: int) -> ctypes.c_void_p:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, HELD + HEAD + offset))
        return ctypes.c_void_p(address)

    def waiters(self) -> int:
        (count,) = struct.unpack_from("<I", self.memory, HELD + HEAD + 40 + 36)
        return int(count) >> 3

    @property
    def turn(self) -> int:
        return self.memory[HELD + HEAD + 88]

    @turn.setter
    def turn(self, value: int) -> None:
        self.memory[HELD + HEAD + 88] = value

    def _take(self) -> None:
        """As ProcessIsRequestCancelled does."""
        LIBC.pthread_mutex_lock(self._at(0))
        self.turn = 1
        LIBC.pthread_cond_broadcast(self._at(40))
        while self.turn:
            LIBC.pthread_cond_wait(self._at(40), self._at(0))
        LIBC.pthread_mutex_unlock(self._at(0))
        self.freed.set()

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


@pytest.fixture
def regions() -> Iterator[list[Region]]:
    made: list[Region] = []
    yield made
    for region in made:
        region.close()


def test_a_server_that_waits_for_a_dead_stub_to_take_its_answer_goes_on(regions: list[Region]) -> None:
    regions.append(region := Region())
    assert stub_rescue.release(region.name, CONTROL)
    assert region.freed.wait(10)
    assert not region.turn


def test_the_dead_that_wait_for_the_same_hold_nothing_up(regions: list[Region]) -> None:
    """A stub that is killed while it waits is counted for ever among those who do: C's own functions would wait for it
    to wake."""
    regions.append(region := Region(waiting=False))
    script = (
        "import ctypes, mmap, os, sys\n"
        f"file = os.open('{SHARED_MEMORY / region.name}', os.O_RDWR)\n"
        "memory = mmap.mmap(file, 0)\n"
        f"at = ctypes.addressof(ctypes.c_char.from_buffer(memory, {HELD + HEAD}))\n"
        "libc = ctypes.CDLL(None)\n"
        "mutex, condition = ctypes.c_void_p(at), ctypes.c_void_p(at + 40)\n"
        "libc.pthread_mutex_lock(mutex)\n"
        "while True:\n    libc.pthread_cond_wait(condition, mutex)\n"
    )
    stub = subprocess.Popen([sys.executable, "-c", script])
    while not region.waiters():
        time.sleep(0.01)
    stub.kill()
    stub.wait()
    region.wait()
    released = threading.Thread(target=stub_rescue.release, args=(region.name, CONTROL), daemon=True)
    released.start()
    released.join(10)
    assert not released.is_alive()
    assert region.freed.wait(10)


def test_a_message_nobody_waits_with_and_one_that_is_not_taken_are_left_alone(regions: list[Region]) -> None:
    regions.append(still := Region(waiting=False))
    still.turn = 1
    regions.append(other := Region(CLEANUP))
    for region in regions:
        before = bytes(region.memory)
        assert stub_rescue.release(region.name, CONTROL)
        assert bytes(region.memory) == before
    assert not other.freed.is_set()


def test_a_first_word_is_counted_once_where_there_never_was_one(regions: list[Region]) -> None:
    regions.append(region := Region(waiting=False))
    struct.pack_into("<ii", region.memory, ANSWERS + HEAD + 120, 0, 0)
    for _ in range(2):
        assert stub_rescue.release(region.name, CONTROL)
    (used,) = struct.unpack_from("<I", region.memory, ANSWERS + HEAD + 32)
    assert used == 1


def test_requests_for_a_dead_stub_are_answered_with_an_error(regions: list[Region]) -> None:
    """As many as the queue has places for, by one message, which 2.51 reads as ProcessRequests does."""
    regions.append(region := Region(waiting=False))
    for _ in range(2):
        stub_rescue.refuse(region.name, CONTROL, "it is dead")
        free, used = struct.unpack_from("<I28xI", region.memory, ANSWERS + HEAD)
        assert (free, used) == (0, PLACES)
    (message,) = set(struct.unpack_from(f"<{PLACES}q", region.memory, BUFFER + HEAD))
    assert TOLD_BUFFER + HEAD < message < TOLD_BUFFER + HEAD + 8 * TOLD_PLACES
    batch = message + HEAD + 48
    error, has_error, has_text, factory_is_gone = struct.unpack_from("<q?x?5x?", region.memory, batch + 96)
    assert (has_error, has_text, factory_is_gone) == (True, True, False)
    characters, length = struct.unpack_from("<qQ", region.memory, error + HEAD)
    assert region.memory[characters + HEAD : characters + HEAD + length] == b"it is dead"
    for counted in (message, error, characters):
        assert region.memory[counted] == 1, "it is never given back"


@pytest.mark.parametrize(("answers", "starts"), [(0, True), (1, True), (2, False), (7, False)])
def test_a_stub_starts_until_it_has_answered_twice(answers: int, starts: bool, regions: list[Region]) -> None:
    regions.append(region := Region(waiting=False))
    struct.pack_into("<ii", region.memory, ANSWERS + HEAD + 120, answers, answers)
    assert stub_rescue.starts(region.name, CONTROL) == starts


@pytest.mark.parametrize("fill", [b"\xff", b"\x7f", b"\x01"])
def test_memory_that_is_laid_out_otherwise_is_left_alone(fill: bytes, regions: list[Region]) -> None:
    regions.append(region := Region(waiting=False))
    region.memory[:] = fill * SIZE
    assert stub_rescue.release(region.name, CONTROL)
    assert not stub_rescue.starts(region.name, CONTROL)
    stub_rescue.refuse(region.name, CONTROL, "it is dead")
    assert bytes(region.memory) == fill * SIZE


def test_a_region_that_is_gone_needs_nothing_more() -> None:
    region = "stub-rescue-that-never-was"
    assert not stub_rescue.release(region, 0)
    stub_rescue.refuse(region, 0, "it is dead")
    assert not stub_rescue.starts(region, 0)
