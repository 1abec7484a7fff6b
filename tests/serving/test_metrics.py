"""What a frontend writes to Triton's metrics."""

from __future__ import annotations

import statistics

import pytest

from engine.serving.messages import Stats
from engine.serving.metrics import Metrics
from tests.serving import stub
from tests.serving.stub import Metric, MetricFamily


@pytest.fixture
def metrics() -> Metrics:
    MetricFamily.made.clear()
    return Metrics(stub.BACKEND, "m", "1")


def histogram() -> Metric:
    return MetricFamily.made["vllm:inter_token_latency_seconds:m:1"]


def test_few_values_are_all_written(metrics: Metrics) -> None:
    values = [i / 1000 for i in range(300)]
    for value in values:
        metrics.next_token(value)
    metrics._flush()
    assert histogram().observed == values
    metrics._flush()
    assert histogram().observed == values


def test_of_many_values_an_even_sample_is_written_and_counters_have_all(metrics: Metrics) -> None:
    for i in range(40_000):
        metrics.next_token((i % 1000) / 1000)
        metrics.tokens(1)
    metrics._flush()
    observed = histogram().observed
    assert len(observed) == 500
    assert statistics.mean(observed) == pytest.approx(0.5, abs=0.08)
    assert statistics.quantiles(observed, n=10)[8] == pytest.approx(0.9, abs=0.08)
    assert MetricFamily.made["vllm:generation_tokens_total:m:1"].value == 40_000
    assert not metrics._observations


def test_a_frontend_that_takes_the_lead_counts_on_from_where_the_engine_stands(metrics: Metrics) -> None:
    """What it heard before, the one that led has written; a restarted engine begins at 0."""
    hits = MetricFamily.made["vllm:prefix_cache_hits:m:1"]
    metrics.engine(Stats(prompt_tokens=50, prefix_hits=20, frontends_lost=1), leading=False)
    metrics._flush()
    assert (hits.value, MetricFamily.made["nereid:frontends_lost:m:1"].value) == (0, 0)
    metrics.engine(Stats(prompt_tokens=60, prefix_hits=25, frontends_lost=1), leading=True)
    metrics._flush()
    assert (hits.value, MetricFamily.made["nereid:frontends_lost:m:1"].value) == (5, 1)
    metrics.engine(Stats(prompt_tokens=8, prefix_hits=3), leading=True)
    metrics._flush()
    assert hits.value == 8
