"""Who goes first, and how many prompt tokens ride with decoding rows.

The waiting queue and the running list are both in the order of `rank`; who is last gives way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.core.plan import MixedShapes
from engine.core.request import Request


def rank(request: Request) -> tuple[int, int]:
    """Lower priority value first, then earlier arrival. A preempted request keeps its place; the last of those who run
    is preempted first, since it has lost least when it starts again."""
    return request.order


# Tokens that a shape must leave prompts for each of its rows: with less, larger steps without a shape are cheaper.
ROOM = 10


@dataclass(frozen=True, slots=True)
class Pace:
    """How many prompt tokens a step takes beside decoding rows.

    A step costs what its decoding rows need, and about as much for each prompt token whether they are 500 or 8,192
    (13 µs for 4 billion parameters on an H200). So small shares hold up decoding rows less, and make prompts wait
    longer by the other costs of more steps; and tokens of a shape that stay empty cost as much as others.

    A step takes what fills the largest shape of at most `fill` tokens beside its rows; where the runner has none, or
    rows leave less than `ROOM` tokens each of it, `least` tokens, or `per_row` for each row. A crowd goes at once, as
    far as the budget allows: `crowd` tokens and `crowd_per_row` for each row, unless both are 0.
    """

    least: int
    per_row: int
    fill: int = 0
    crowd: int = 0
    crowd_per_row: int = 0

    def share(self, rows: int, backlog: int, shapes: MixedShapes) -> int | None:
        """Prompt tokens for a step of `rows` decoding rows while `backlog` prompt tokens are to be computed; None for
        as many as the step may take."""
        if 0 < self.enough(rows) <= backlog:
            return None
        room = shapes.room(rows, self.fill)
        return room if room and room >= ROOM * rows else max(self.least, self.per_row * rows)

    def enough(self, rows: int) -> int:
        """Prompt tokens that are a crowd beside so many rows; 0 when none are."""
        return self.crowd + self.crowd_per_row * rows


# A token that is multiplied by less than this part of the weights has experts, which a small step reads for few tokens.
SPARSE = 0.5


def pace(preference: str, active: float, even: int) -> Pace:
    """The pace of a setting for a model whose tokens are multiplied by the part `active` of its weights, and are
    cheapest in steps of `even` tokens.

    In a dense model a token costs about the same in such a step as in a whole budget, so a crowd goes at once when
    more wait than decode, or for throughput; with experts tokens are cheaper the more there are (docs/performance.md
    has the figures).
    """
    if preference == "latency":
        return Pace(least=512, per_row=8, crowd=8192, crowd_per_row=2048)
    if active < SPARSE or preference == "throughput":
        return Pace(least=1024, per_row=32, fill=even, crowd=4096)
    return Pace(least=1024, per_row=32, fill=even, crowd=1024, crowd_per_row=1024)


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
