"""Who goes first, and how many prompt tokens ride with decoding rows.

The waiting queue and the running list are both in the order of `rank`; who is last gives way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.core.request import Request


def rank(request: Request) -> tuple[int, int]:
    """Lower priority value first, then earlier arrival. A preempted request keeps its place; the last of those who run
    is preempted first, since it has lost least when it starts again."""
    return request.order


@dataclass(frozen=True, slots=True)
class Pace:
    """How many prompt tokens a step takes beside decoding rows.

    A token of a prompt costs the same in any step of some hundred tokens or more (12 µs for 4 billion parameters on an
    H200), and a step costs what its decoding rows need besides. So small shares hold up decoding rows less and make
    prompts wait longer, by the other costs of more steps. A step takes `least` tokens, or `per_row` for each decoding
    row; when a crowd waits, one part in `horizon` of what it has to compute.
    """

    least: int
    per_row: int
    horizon: int

    def share(self, rows: int, backlog: int) -> int:
        """Prompt tokens for a step of `rows` decoding rows while `backlog` prompt tokens are to be computed."""
        return max(self.least, self.per_row * rows, backlog // self.horizon)


PACES = {"throughput": Pace(least=1024, per_row=4, horizon=2), "latency": Pace(least=256, per_row=4, horizon=16)}


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
