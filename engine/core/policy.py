"""Who goes first: the waiting queue's order, and who gives way when blocks run out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from engine.core.request import Request


def rank(request: Request) -> tuple[int, int]:
    """Lower priority value first, then earlier arrival. A preempted request keeps its place."""
    return request.order


class WaitingQueue:
    """Requests that wait for a row, in the order of `rank`."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def take(self, admitted: Iterable[Request]) -> None:
        """Remove all of `admitted` at once."""
        gone = {id(request) for request in admitted}
        self._requests = [request for request in self._requests if id(request) not in gone]


def victim(candidates: Iterable[Request]) -> Request | None:
    """The request to preempt: the youngest of the least urgent, since it has lost least when it starts again."""
    return max(candidates, key=rank, default=None)
