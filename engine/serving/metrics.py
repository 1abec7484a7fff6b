"""Metrics of a model on Triton's own metrics port, under vLLM's names.

Families of one name made in several stubs are one family there: counters and histograms of the frontends add up.
What only the engine knows (gauges, cache and preemption counts) is written by the frontend that leads.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import Any

from engine.serving.messages import Stats
from engine.types import FinishReason

_FLUSH_S = 0.5
_MOST_OBSERVED = 500  # values of a histogram that are written at once; each takes about 0.07 ms

_TTFT_BUCKETS = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
]  # fmt: skip
_ITL_BUCKETS = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
]  # fmt: skip
_E2E_BUCKETS = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
]  # fmt: skip

_GAUGES = {
    "num_requests_running": "Requests that the engine computes",
    "num_requests_waiting": "Requests in the engine's queue",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1",
    "kv_cache_blocks_used": "KV blocks in use by requests",
    "kv_cache_blocks_total": "KV blocks in the pool",
}
# vLLM has no such figures: they have our own prefix. `frontends_lost` is a gauge because a frontend that comes when all
# others have died has to write it.
_OWN_GAUGES = {
    "frontends": "Frontends that the engine process is connected to",
    "frontends_lost": "Frontends that died since the engine process started",
}
_OWN_COUNTERS = {
    "late_compiles_total": "Kernels compiled after the engine was ready: each held up every request",
}
_ENGINE_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "num_preemptions_total": "Requests put back into the queue because blocks ran out",
}
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of requests that were answered",
    "generation_tokens_total": "Tokens generated",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Between two tokens of a request, of many a sample", _ITL_BUCKETS),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token", _E2E_BUCKETS),
}


class Metrics:
    """Collects on any thread, writes on its own: every write is a round trip to the server, on the way that responses
    take. So of very many values a histogram gets a random sample: their quantiles and their mean, not their number.
    Counters have everything."""

    def __init__(self, pb: Any, model: str, version: str) -> None:
        self._pb = pb
        self._labels = {"model": model, "version": version}
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        counter, gauge, histogram = pb.MetricFamily.COUNTER, pb.MetricFamily.GAUGE, pb.MetricFamily.HISTOGRAM
        for name, text in _GAUGES.items():
            self._add(name, text, gauge)
        for name, text in {**_ENGINE_COUNTERS, **_COUNTERS}.items():
            self._add(name, text, counter)
        for name, text in _OWN_COUNTERS.items():
            self._add(name, text, counter, prefix="nereid")
        for name, text in _OWN_GAUGES.items():
            self._add(name, text, gauge, prefix="nereid")
        for name, (text, buckets) in _HISTOGRAMS.items():
            self._add(name, text, histogram, buckets=buckets)
        for reason in FinishReason:
            self._add("request_success_total", "Requests by how they ended", counter, finished_reason=reason.value)
        self._observations: deque[tuple[str, float]] = deque()
        self._counts: deque[tuple[str, int]] = deque()
        self._stats: Stats | None = None
        self._written: Stats | None = None
        self._counted: Stats | None = None
        self._leading = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nereid-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def first_token(self, seconds: float, num_prompt: int) -> None:
        self._counts.append(("prompt_tokens_total", num_prompt))
        self._observations.append(("time_to_first_token_seconds", seconds))

    def next_token(self, seconds: float) -> None:
        self._observations.append(("inter_token_latency_seconds", seconds))

    def tokens(self, count: int) -> None:
        self._counts.append(("generation_tokens_total", count))

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self._counts.append((f"request_success_total:{reason.value}", 1))
        self._observations.append(("e2e_request_latency_seconds", seconds))

    def engine(self, stats: Stats, leading: bool) -> None:
        """The engine's state. The frontend that leads writes it; the others know from where to go on when they lead.
        What an engine counted before this frontend came, others have written. A restarted one counts from 0 again."""
        if self._counted is None:
            self._counted = stats
        self._stats, self._leading = stats, leading

    def _run(self) -> None:
        while not self._closing.wait(_FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        # Counts of a request are written no later than its observations: they are collected before, and taken after.
        num_observations = len(self._observations)
        totals: dict[str, int] = {}
        for _ in range(len(self._counts)):
            name, count = self._counts.popleft()
            totals[name] = totals.get(name, 0) + count
        for name, count in totals.items():
            self._metrics[name].increment(count)
        observed: dict[str, list[float]] = {}
        for _ in range(num_observations):
            name, value = self._observations.popleft()
            observed.setdefault(name, []).append(value)
        for name, values in observed.items():
            for value in random.sample(values, _MOST_OBSERVED) if len(values) > _MOST_OBSERVED else values:
                self._metrics[name].observe(value)
        stats, self._stats = self._stats, None
        if stats is not None and self._counted is not None:
            if self._leading and stats != self._written:
                self._write_engine(stats, self._counted)
                self._written = stats
            self._counted = stats

    def _write_engine(self, stats: Stats, before: Stats) -> None:
        self._metrics["num_requests_running"].set(stats.running)
        self._metrics["num_requests_waiting"].set(stats.waiting)
        self._metrics["kv_cache_blocks_used"].set(stats.blocks_used)
        self._metrics["kv_cache_blocks_total"].set(stats.blocks_total)
        self._metrics["kv_cache_usage_perc"].set(stats.blocks_used / max(1, stats.blocks_total))
        self._metrics["frontends"].set(stats.frontends)
        self._metrics["frontends_lost"].set(stats.frontends_lost)
        if stats.prompt_tokens < before.prompt_tokens:
            before = Stats()
        for name, grown in (
            ("prefix_cache_queries", stats.prefix_queries - before.prefix_queries),
            ("prefix_cache_hits", stats.prefix_hits - before.prefix_hits),
            ("num_preemptions_total", stats.preemptions - before.preemptions),
            ("late_compiles_total", stats.late_compiles - before.late_compiles),
        ):
            if grown > 0:
                self._metrics[name].increment(grown)

    def _add(
        self,
        name: str,
        text: str,
        kind: Any,
        buckets: list[float] | None = None,
        prefix: str = "vllm",
        **labels: str,
    ) -> None:
        if name not in self._families:
            self._families[name] = self._pb.MetricFamily(name=f"{prefix}:{name}", description=text, kind=kind)
        extra: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
        key = ":".join([name, *labels.values()])
        self._metrics[key] = self._families[name].Metric(labels={**self._labels, **labels}, **extra)
