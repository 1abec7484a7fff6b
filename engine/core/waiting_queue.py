"""Who goes first: the waiting queue and the running list are both in the order of `rank`; who is last gives way."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from engine.core.request import Request


def rank(request: Request) -> tuple[int, int]:
    """Lower priority value first, then earlier arrival. A preempted request keeps its place; the last of those who run
    is preempted first, since it has lost least when it starts again."""
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
