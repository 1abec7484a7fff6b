"""Messages through shared memory: whole, in order, of any size, to every reader."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.parallel.ring import RING_BYTES, RingClosed, RingReader, RingWriter


@pytest.fixture
def given_up() -> threading.Event:
    return threading.Event()


@pytest.fixture
def writer(given_up: threading.Event) -> Iterator[RingWriter]:
    made = RingWriter(2, given_up.is_set)
    yield made
    made.close()


def readers(writer: RingWriter) -> list[RingReader]:
    return [RingReader(writer.descriptor, bell, i, 2) for i, bell in enumerate(writer.theirs)]


def hear(reader: RingReader, count: int, heard: list[bytes]) -> threading.Thread:
    def run() -> None:
        for message in reader.messages():
            heard.append(message)
            if len(heard) == count:
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_every_reader_hears_every_message_whole_and_in_order(writer: RingWriter) -> None:
    sizes = [0, 1, 7, RING_BYTES - 8, RING_BYTES, 2 * RING_BYTES + 5, 3, *range(100)]
    sent = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    heard: list[list[bytes]] = [[], []]
    threads = [hear(reader, len(sent), own) for reader, own in zip(readers(writer), heard, strict=True)]
    for message in sent:
        writer.send(message)
    for thread in threads:
        thread.join(30)
    assert heard == [sent, sent]
    # The last one is dealt with when the next is asked for.
    assert [writer.done(i) for i in range(2)] == [len(sent) - 1] * 2
    assert writer.sent == len(sent)


def test_a_reader_ends_with_its_writer(writer: RingWriter) -> None:
    heard: list[bytes] = []
    reader = readers(writer)[0]
    thread = hear(reader, 10, heard)
    writer.send(b"one")
    writer.bell(0).shutdown(2)
    thread.join(10)
    assert not thread.is_alive()
    assert heard == [b"one"]


def test_readers_that_make_no_room_are_waited_for_until_they_are_given_up(
    writer: RingWriter, given_up: threading.Event
) -> None:
    threading.Timer(0.2, given_up.set).start()
    with pytest.raises(RingClosed, match="take no more plans"):
        writer.send(bytes(RING_BYTES + 1))


def test_a_reader_says_that_it_is_alive(writer: RingWriter) -> None:
    assert writer.silent_s(0) is None
    readers(writer)[0].beat()
    silent = writer.silent_s(0)
    assert silent is not None
    assert 0 <= silent < 60
    assert writer.silent_s(1) is None
