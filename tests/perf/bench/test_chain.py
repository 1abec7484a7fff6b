"""What perf.bench.chain reads from its command line."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from perf.bench.chain import POINTS, lines


def test_lines_are_counted_out() -> None:
    assert lines("1x256") == [(1, 256)]
    assert lines("2*1x300,512x768") == [(1, 300), (1, 300), (512, 768)]


def test_lines_of_one_query_come_first_in_every_point() -> None:
    for point in POINTS:
        queries = [count for count, _ in lines(point)]
        assert sorted(queries, key=lambda count: count != 1) == queries
        assert all(count <= context for count, context in lines(point))
