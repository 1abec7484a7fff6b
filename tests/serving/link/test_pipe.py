"""Messages over a socket: whole, in order, never waited for."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine.serving.link.pipe import Pipe


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    left, right = (Pipe(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield left, right
    left.close()
    right.close()


def receive(pipe: Pipe, count: int, timeout_s: float = 10.0) -> list[bytes]:
    """The next `count` messages, or fewer when the other side ends."""
    messages: list[bytes] = []
    until = time.monotonic() + timeout_s
    while len(messages) < count and not pipe.ended and time.monotonic() < until:
        select.select([pipe], [], [], 0.1)
        messages += pipe.receive()
    return messages


def test_messages_arrive_whole_and_both_ways(ends: tuple[Pipe, Pipe]) -> None:
    left, right = ends
    said = [b"", b"a", b"b" * 5, b"c" * (1 << 16), b"d" * ((1 << 16) - 4), b"e" * 70_000]
    for message in said:
        left.send(message)
        right.send(message[::-1])
    assert receive(right, len(said)) == said
    assert receive(left, len(said)) == said
    assert right.receive() == []


def test_what_the_socket_does_not_take_goes_out_later_in_order(ends: tuple[Pipe, Pipe]) -> None:
    left, right = ends
    said = [bytes([i % 256]) * (1 + 997 * i % 50_000) for i in range(400)]
    began = time.monotonic()
    for message in said:
        left.send(message)  # nobody reads yet: some megabytes more than a socket holds
    assert time.monotonic() - began < 5.0
    assert receive(right, len(said)) == said


def test_many_senders_do_not_tear_each_others_messages(ends: tuple[Pipe, Pipe]) -> None:
    left, right = ends

    def send(name: int) -> None:
        for i in range(100):
            left.send(bytes([name]) * (1 + i * 131))

    senders = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for sender in senders:
        sender.start()
    got = receive(right, 400)
    for name in range(4):
        assert [len(m) for m in got if m[0] == name] == [1 + i * 131 for i in range(100)]
    assert all(len(set(m)) == 1 for m in got)


def test_an_end_is_noticed_after_the_last_message(ends: tuple[Pipe, Pipe]) -> None:
    left, right = ends
    left.send(b"last")
    left.close()
    assert receive(right, 1) == [b"last"]
    assert receive(right, 1) == []
    assert right.ended
    right.send(b"to nobody")
    left.send(b"from nobody")


def test_closing_lingers_for_what_waits(ends: tuple[Pipe, Pipe]) -> None:
    left, right = ends
    said = [b"x" * 100_000] * 20
    for message in said:
        left.send(message)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(receive(right, len(said))))
    reader.start()
    left.close(linger_s=10.0)
    reader.join()
    assert got == said
