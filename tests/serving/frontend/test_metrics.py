"""What a frontend writes to Triton's metrics."""

from __future__ import annotations

import statistics

import pytest

from engine.serving.frontend.metrics import Figures, Metrics
from engine.serving.link.messages import Stats
from engine.types import FinishReason
from tests.serving import stub
from tests.serving.stub import Metric, MetricFamily

# What the queries of vLLM's published dashboards name (its examples/observability, prometheus_grafana/grafana.json
# and dashboards/grafana/*.json), but for figures of what this engine has not; counters with their `_total`.
VLLM_NAMES = {
    f"vllm:{name}"
    for name in (
        "cache_config_info", "e2e_request_latency_seconds", "engine_sleep_state", "generation_tokens_total",
        "inter_token_latency_seconds", "iteration_tokens_total", "kv_cache_usage_perc", "num_preemptions_total",
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "prefix_cache_hits_total",
        "prefix_cache_queries_total", "prompt_tokens_by_source_total", "prompt_tokens_cached_total",
        "prompt_tokens_total", "request_decode_time_seconds", "request_generation_tokens",
        "request_inference_time_seconds", "request_max_num_generation_tokens", "request_params_max_tokens",
        "request_params_n", "request_prefill_kv_computed_tokens", "request_prefill_time_seconds",
        "request_prompt_tokens", "request_queue_time_seconds", "request_success_total",
        "request_time_per_output_token_seconds", "time_per_output_token_seconds", "time_to_first_token_seconds",
    )
}  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    MetricFamily.made.clear()
    return Metrics(stub.BACKEND, "m", "1")


def histogram() -> Metric:
    return MetricFamily.made["vllm:inter_token_latency_seconds:m:m:0:1"]


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
    assert MetricFamily.made["vllm:generation_tokens_total:m:m:0:1"].value == 40_000
    assert not metrics._observations


def test_drafts_are_counted_under_vllms_names(metrics: Metrics) -> None:
    metrics.engine(Stats(prompt_tokens=1), leading=True)
    for scale in (1, 2):
        counted = {"drafts": 1 * scale, "draft_tokens": 4 * scale, "accepted_at": (2 * scale, scale, 0)}
        metrics.engine(Stats(prompt_tokens=1, accepted_tokens=3 * scale, **counted), leading=True)
        metrics._flush()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    values = [MetricFamily.made[f"vllm:spec_decode_num_{name}_total:m:m:0:1"].value for name in names]
    assert values == [2, 8, 6]
    places = {name: made.value for name, made in MetricFamily.made.items() if "per_pos" in name}
    assert places == {f"vllm:spec_decode_num_accepted_tokens_per_pos_total:m:m:0:1:{i}": 4 - 2 * i for i in (0, 1)}


def test_a_frontend_that_takes_the_lead_counts_on_from_where_the_engine_stands(metrics: Metrics) -> None:
    """What it heard before, the one that led has written; a restarted engine begins at 0."""
    hits = MetricFamily.made["vllm:prefix_cache_hits_total:m:m:0:1"]
    metrics.engine(Stats(prompt_tokens=50, prefix_hits=20, frontends_lost=1), leading=False)
    metrics._flush()
    assert (hits.value, MetricFamily.made["nereid:frontends_lost:m:m:0:1"].value) == (0, 0)
    metrics.engine(Stats(prompt_tokens=60, prefix_hits=25, frontends_lost=1), leading=True)
    metrics._flush()
    assert (hits.value, MetricFamily.made["nereid:frontends_lost:m:m:0:1"].value) == (5, 1)
    metrics.engine(Stats(prompt_tokens=8, prefix_hits=3), leading=True)
    metrics._flush()
    assert hits.value == 8


def test_every_name_that_vllms_dashboards_ask_for_is_made(metrics: Metrics) -> None:
    metrics.engine(Stats(blocks_total=95), leading=True)
    metrics._flush()
    made = {name.split(":m:m:0:1")[0] for name in MetricFamily.made}
    assert made >= VLLM_NAMES, VLLM_NAMES - made


def test_a_requests_figures_become_vllms_histograms(metrics: Metrics) -> None:
    figures = Figures(
        queue_s=0.1, prefill_s=0.2, decode_s=0.9, num_prompt=50, num_computed=18, num_generated=14, num_longest=10,
        max_tokens=16, n=2,
    )  # fmt: skip
    metrics.finished(FinishReason.LENGTH, 1.3, figures)
    metrics.finished(FinishReason.REJECTED, 0.1)
    metrics._flush()
    seen = {name.split(":m:m:0:1")[0]: metric.observed for name, metric in MetricFamily.made.items()}
    assert seen["vllm:e2e_request_latency_seconds"] == [1.3, 0.1]
    wanted = {
        "queue_time_seconds": 0.1, "prefill_time_seconds": 0.2, "decode_time_seconds": 0.9,
        "inference_time_seconds": 1.1, "time_per_output_token_seconds": 0.1, "prompt_tokens": 50,
        "generation_tokens": 14, "max_num_generation_tokens": 10, "prefill_kv_computed_tokens": 18,
        "params_max_tokens": 16, "params_n": 2,
    }  # fmt: skip
    assert {name: seen[f"vllm:request_{name}"] for name in wanted} == {
        name: [pytest.approx(value)] for name, value in wanted.items()
    }


def test_steps_are_observed_by_bucket_and_their_tokens_add_up(metrics: Metrics) -> None:
    steps = MetricFamily.made["vllm:iteration_tokens_total:m:m:0:1"]
    none = (0,) * 11
    metrics.engine(Stats(step_counts=(5, 1, 0, *none), step_tokens=(5, 8, 0, *none)), leading=True)
    metrics._flush()
    assert steps.observed == []  # before this frontend came
    metrics.engine(Stats(step_counts=(7, 3, 1, *none), step_tokens=(7, 22, 16, *none)), leading=True)
    metrics._flush()
    assert sorted(steps.observed) == [1, 1, 7, 7, 16]


def test_a_restarted_engines_steps_count_from_nothing(metrics: Metrics) -> None:
    steps = MetricFamily.made["vllm:iteration_tokens_total:m:m:0:1"]
    metrics.engine(Stats(prompt_tokens=9, step_counts=(5,), step_tokens=(5,)), leading=True)
    metrics._flush()
    metrics.engine(Stats(prompt_tokens=2, step_counts=(2,), step_tokens=(2,)), leading=True)
    metrics._flush()
    assert steps.observed == [1, 1]


def test_the_last_frontend_leaves_gauges_at_zero(metrics: Metrics) -> None:
    metrics.engine(Stats(frontends=2, blocks_total=9), leading=True)
    metrics.start()
    metrics.close()
    metrics.remove()
    assert MetricFamily.made["nereid:frontends:m:m:0:1"].value == 0
    assert MetricFamily.made["vllm:kv_cache_blocks_total:m:m:0:1"].value == 0
