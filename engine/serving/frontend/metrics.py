"""Metrics of a model on Triton's own metrics port, under vLLM's names (`metric_families`).

Families of one name made in several stubs are one family there: counters and histograms of the frontends add up.
What only the engine knows (gauges, cache and preemption counts, tokens of steps) is written by the frontend that leads.
"""

from __future__ import annotations

import faulthandler
import random
import threading
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from engine.config import CacheConfig, ParallelConfig
from engine.core.plan import STEP_TOKENS_BUCKETS
from engine.serving.frontend import metric_families as family
from engine.serving.link.messages import Stats
from engine.types import FinishReason

_FLUSH_S = 0.5
_MAX_REMOVE_S = 3.0
# Values of a histogram that are written at once; each takes about 0.07 ms.
_MAX_OBSERVED = 50
_MAX_OF_ITL = 500


class Figures(msgspec.Struct, frozen=True):
    """What one request that gave tokens took. queue_s, prefill_s: as the engine measured them. decode_s: from the first
    token to the last. num_computed: prompt tokens that were not cached. num_longest: tokens of its longest answer."""

    queue_s: float
    prefill_s: float
    decode_s: float
    num_prompt: int
    num_computed: int
    num_generated: int
    num_longest: int
    max_tokens: int
    n: int


class Metrics:
    """Collects on any thread, writes on its own: every write is a round trip to the server, on the way that responses
    take. So of very many values a histogram gets a random sample: their quantiles and their mean, not their number.
    Counters have everything."""

    def __init__(
        self,
        pb: Any,
        model: str,
        version: str,
        cache: CacheConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self._pb = pb
        self._cache = cache or CacheConfig()
        # Tokens of a block, on all ranks together.
        self._block_size = self._cache.block_size * (parallel or ParallelConfig()).block_shares
        # vLLM numbers its engines; one model has one here.
        self._labels = {"model": model, "model_name": model, "engine": "0", "version": version}
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        counter, gauge, histogram = pb.MetricFamily.COUNTER, pb.MetricFamily.GAUGE, pb.MetricFamily.HISTOGRAM
        for name, text in family.GAUGES.items():
            self._add(name, text, gauge)
        for name, text in family.COUNTERS.items():
            self._add(name, text, counter)
        for name, (text, buckets) in family.HISTOGRAMS.items():
            self._add(name, text, histogram, buckets)
        self._add(family.STEP_TOKENS, family.STEP_TEXT, histogram, STEP_TOKENS_BUCKETS)
        for name, text in family.LABELLED_GAUGES.items():
            self._families[name] = pb.MetricFamily(name=name, description=text, kind=gauge)
        for name, text in family.LABELLED_COUNTERS.items():
            self._families[name] = pb.MetricFamily(name=name, description=text, kind=counter)
        self._label(family.WAITING_BY_REASON, reason="capacity")
        for source in (family.COMPUTED, family.CACHED):
            self._label(family.BY_SOURCE, source=source)
        for reason in FinishReason:
            self._label(family.SUCCESS, finished_reason=reason.value)
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
        """Write what is left; nothing is written after that."""
        self._closing.set()
        self._thread.join()

    def remove(self) -> None:
        """Take the series off the page, after `close`, where no other instance of the model is there or about to come:
        the server counts references to a series by instance, so it would free what another one writes to.

        What an instance that died had on the page stays as long as the server: gauges of 0 say that nothing is served.
        tritonserver 2.51 sometimes never answers, while this process has the interpreter's lock and a lock that other
        servers wait for: then the process ends, which was about to.
        """
        faulthandler.dump_traceback_later(_MAX_REMOVE_S, exit=True)
        for name in family.GAUGES:
            self._metrics[name].set(0)
        self._metrics.clear()
        self._families.clear()
        faulthandler.cancel_dump_traceback_later()

    def first_token(self, seconds: float, num_prompt: int, num_cached: int) -> None:
        """A request's first token came so many seconds after the request, of whose prompt `num_cached` were cached."""
        self._observations.append((family.TTFT, seconds))
        self._counts.append((family.PROMPT_TOKENS, num_prompt))
        self._counts.append((f"{family.BY_SOURCE}:{family.COMPUTED}", num_prompt - num_cached))
        if num_cached:
            self._counts.append((family.CACHED_TOKENS, num_cached))
            self._counts.append((f"{family.BY_SOURCE}:{family.CACHED}", num_cached))

    def next_token(self, seconds: float) -> None:
        self._observations.append((family.ITL, seconds))

    def tokens(self, count: int) -> None:
        self._counts.append((family.GENERATION_TOKENS, count))

    def finished(self, reason: FinishReason, seconds: float, figures: Figures | None = None) -> None:
        """A request ended after `seconds`. figures: None when it gave no token."""
        self._counts.append((f"{family.SUCCESS}:{reason.value}", 1))
        self._observations.append((family.E2E, seconds))
        if figures is None:
            return
        values = {
            family.QUEUE: figures.queue_s,
            family.PREFILL: figures.prefill_s,
            family.DECODE: figures.decode_s,
            family.INFERENCE: figures.prefill_s + figures.decode_s,
            family.PROMPT: figures.num_prompt,
            family.GENERATION: figures.num_generated,
            family.LONGEST: figures.num_longest,
            family.COMPUTED_PROMPT: figures.num_computed,
            family.MAX_TOKENS: figures.max_tokens,
            family.N: figures.n,
        }
        if figures.num_longest > 1:
            values[family.MEAN_PER_TOKEN] = figures.decode_s / (figures.num_longest - 1)
        self._observations.extend(values.items())

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
        """Write what was noted since the last time."""
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
        if family.ITL in observed:
            observed[family.ITL_OLD_NAME] = observed[family.ITL]
        for name, values in observed.items():
            self._observe(name, values)
        stats, self._stats = self._stats, None
        if stats is not None and self._counted is not None:
            if self._leading and stats != self._written:
                self._write_engine(stats, self._counted)
                self._written = stats
            self._counted = stats

    def _observe(self, name: str, values: Sequence[float]) -> None:
        most = _MAX_OF_ITL if name == family.ITL else _MAX_OBSERVED
        for value in random.sample(values, most) if len(values) > most else values:
            self._metrics[name].observe(value)

    def _write_engine(self, stats: Stats, before: Stats) -> None:
        """Gauges as they are, and counters by what they grew since `before`; a new engine counts from 0."""
        if self._written is None:
            self._write_facts(stats)
        self._metrics["vllm:num_requests_running"].set(stats.running)
        self._metrics["vllm:num_requests_waiting"].set(stats.waiting)
        self._metrics[f"{family.WAITING_BY_REASON}:capacity"].set(stats.waiting)
        self._metrics["vllm:kv_cache_blocks_used"].set(stats.blocks_used)
        self._metrics["vllm:kv_cache_blocks_total"].set(stats.blocks_total)
        self._metrics["vllm:kv_cache_usage_perc"].set(stats.blocks_used / max(1, stats.blocks_total))
        self._metrics["nereid:frontends"].set(stats.frontends)
        self._metrics["nereid:frontends_lost"].set(stats.frontends_lost)
        if stats.prompt_tokens < before.prompt_tokens:
            before = Stats()
        for name, grown in (
            (family.PREFIX_QUERIES, stats.prefix_queries - before.prefix_queries),
            (family.PREFIX_HITS, stats.prefix_hits - before.prefix_hits),
            (family.PREEMPTIONS, stats.preemptions - before.preemptions),
            (family.LATE_COMPILES, stats.late_compiles - before.late_compiles),
            (family.DRAFTS, stats.drafts - before.drafts),
            (family.DRAFT_TOKENS, stats.draft_tokens - before.draft_tokens),
            (family.ACCEPTED_TOKENS, stats.accepted_tokens - before.accepted_tokens),
        ):
            if grown > 0:
                self._metrics[name].increment(grown)
        for place, (now, then) in enumerate(zip_longest(stats.accepted_at, before.accepted_at, fillvalue=0)):
            if now > then:
                self._at(family.ACCEPTED_AT, position=str(place)).increment(now - then)
        self._observe(family.STEP_TOKENS, _steps(stats, before))

    def _write_facts(self, stats: Stats) -> None:
        for state in ("awake", "weights_offloaded", "discard_all"):
            self._label(family.SLEEP_STATE, sleep_state=state).set(state == "awake")
        cache = self._cache
        self._label(
            family.CACHE_CONFIG,
            block_size=str(self._block_size),
            num_gpu_blocks=str(stats.blocks_total),
            cache_dtype=stats.cache_dtype,
            enable_prefix_caching=str(cache.prefix_cache),
            gpu_memory_utilization=str(cache.memory_fraction),
        ).set(1)

    def _add(self, name: str, text: str, kind: Any, buckets: Sequence[float] | None = None) -> None:
        made = self._families[name] = self._pb.MetricFamily(name=name, description=text, kind=kind)
        extra: dict[str, Any] = {} if buckets is None else {"buckets": list(buckets)}
        self._metrics[name] = made.Metric(labels=self._labels, **extra)

    def _at(self, name: str, **labels: str) -> Any:
        """The metric of a family with more labels than the model's, made when it is first needed."""
        held = self._metrics.get(":".join([name, *labels.values()]))
        return self._label(name, **labels) if held is None else held

    def _label(self, name: str, **labels: str) -> Any:
        """Make such a metric."""
        metric = self._families[name].Metric(labels={**self._labels, **labels})
        self._metrics[":".join([name, *labels.values()])] = metric
        return metric


class NoMetrics(Metrics):
    """Of a model that reports none: what it is told is forgotten."""

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def first_token(self, seconds: float, num_prompt: int, num_cached: int) -> None:
        pass

    def next_token(self, seconds: float) -> None:
        pass

    def tokens(self, count: int) -> None:
        pass

    def finished(self, reason: FinishReason, seconds: float, figures: Figures | None = None) -> None:
        pass

    def engine(self, stats: Stats, leading: bool) -> None:
        pass


def _steps(stats: Stats, before: Stats) -> list[float]:
    """Tokens of the steps since `before`: each counts as the mean of the new ones in its bucket."""
    counts, totals = stats.step_counts, stats.step_tokens
    known = before.step_counts or [0] * len(counts), before.step_tokens or [0] * len(totals)
    steps: list[float] = []
    for count, total, count_before, total_before in zip(counts, totals, *known, strict=True):
        if grown := count - count_before:
            steps += [(total - total_before) / grown] * grown
    return steps
