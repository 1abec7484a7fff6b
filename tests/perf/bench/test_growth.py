"""The engine's own work in a decode step, counted in calls of functions: in proportion to rows, and to nothing else."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from perf.bench.host import build, submit


def calls(function: Callable[[], Any]) -> int:
    """Calls of Python and C functions that `function` makes."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def step_calls(rows: int, context: int = 64, waiting: int = 0) -> int:
    """Calls of one decode step of `rows` rows, of several the most: some of them begin blocks."""
    engine = build(rows, 2 * context + 64)
    for i in range(rows + waiting):
        submit(engine, str(i), [1 + (31 * i + j) % 1000 for j in range(context)], 60)
    loop, inflight = engine.loop, None
    for _ in range(20):
        inflight = loop.iterate(inflight)
    assert inflight is not None
    assert len(inflight.plan.rows) == rows

    def one() -> None:
        nonlocal inflight
        inflight = loop.iterate(inflight)

    return max(calls(one) for _ in range(20))


def test_work_grows_with_rows_no_faster_than_they_do() -> None:
    counts = [step_calls(rows) for rows in (16, 32, 64, 128)]
    for fewer, more in itertools.pairwise(counts):
        assert fewer < more <= 2 * fewer, counts


def test_work_does_not_grow_with_context_pool_or_queue() -> None:
    counts = [step_calls(8, context) for context in (64, 512, 2048)]
    assert max(counts) <= counts[0] + 8, counts  # the pool grows with the context here
    assert step_calls(8, waiting=100) <= step_calls(8, waiting=1) + 8
