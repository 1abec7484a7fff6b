"""The arithmetic of bench and top, without a server."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from clients.python import bench, top
from clients.python.timing import Timing, percentile
from perf.load import perf_analyzer

PAGE = """\
# HELP vllm:num_requests_running Requests that the engine computes
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model="demo",version="1"}} 3
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model="demo",version="1"}} {tokens}
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{model="demo",version="1"}} {tokens}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{model="demo",version="1"}} 30
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{model="demo",version="1",le="1"}} {count}
vllm:time_to_first_token_seconds_bucket{{model="demo",version="1",le="+Inf"}} {count}
vllm:time_to_first_token_seconds_sum{{model="demo",version="1"}} {total}
vllm:time_to_first_token_seconds_count{{model="demo",version="1"}} {count}
# TYPE nv_inference_count counter
nv_inference_count{{model="demo",version="1"}} 7
"""


def test_top_reads_growth_between_two_looks() -> None:
    before = top.parse(PAGE.format(tokens=100, count=1, total=0.5), at=10.0)
    now = top.parse(PAGE.format(tokens=300, count=5, total=0.9), at=12.0)
    assert now.models["demo"]["num_requests_running"] == 3
    assert "nv_inference_count" not in now.models["demo"]
    cells = [next(iter(column.cells)) for column in top.table(before, now).columns]
    assert cells == ["demo", "3", "0", "0%", "0%", "0", "100", "100.0", "-", "0"]


def test_top_has_no_row_for_a_model_that_is_unloaded() -> None:
    page = PAGE.format(tokens=100, count=1, total=0.5)
    for frontends, shown in ((2, True), (0, False)):
        line = f'# TYPE nereid:frontends gauge\nnereid:frontends{{model="demo",model_name="demo"}} {frontends}\n'
        sample = top.parse(page + line, at=10.0)
        assert ("demo" in sample.models) is shown
        assert top.table(sample, sample).row_count == shown


def test_the_tables_fit_into_a_terminal_of_80_characters() -> None:
    sample = top.parse(PAGE.format(tokens=100_000, count=5, total=0.9).replace("demo", "qwen3-30b-a3b"), at=10.0)
    work = bench.Work(streams=256, requests=2, num_input=16384, num_output=1024)
    row = bench.Figures(work=work, seconds=9.0, num_tokens=524_288, ttft=[12.3], gaps=[0.5])
    profile = perf_analyzer.Profile(256, 2048, 131_072, 9.0, ttft=[12.3], itl=[0.5], latency=[123.4])
    for table in (top.table(sample, sample), bench.table([row]), perf_analyzer.table([profile])):
        out = io.StringIO()
        Console(file=out, width=80).print(table)
        assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()  # something is cut off


def test_top_of_one_look_has_no_rates() -> None:
    sample = top.parse(PAGE.format(tokens=100, count=1, total=0.5), at=10.0)
    assert "-" in [next(iter(column.cells)) for column in top.table(sample, sample).columns]


@pytest.mark.parametrize(("p", "value"), [(0, 1), (25, 1.75), (50, 2.5), (99, 3.97), (100, 4)])
def test_percentiles_lie_between_the_two_nearest_values(p: float, value: float) -> None:
    assert percentile([4, 2, 1, 3], p) == pytest.approx(value)
    assert percentile([7], p) == 7


def test_timing_counts_tokens_not_responses() -> None:
    timing = Timing()
    assert (timing.ttft, timing.total, timing.tokens_per_s, str(timing)) == (None, None, None, "no tokens")
    timing.token(3)
    timing.token()
    assert timing.num_tokens == 4
    assert timing.gaps[:2] == [0.0, 0.0]
    assert len(timing.gaps) == 3
    assert timing.ttft is not None
    assert timing.total is not None
    assert timing.ttft <= timing.total
