"""`nereid top`: a live view of a server's metrics page."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.table import Column, Table

_PREFIXES = ("vllm:", "nereid:")
_FRONTENDS = "frontends"


class Sample(msgspec.Struct, frozen=True):
    """The metrics page at one moment: model -> metric (without _total) -> value; histograms by _sum and _count."""

    at: float
    models: dict[str, dict[str, float]]


def read(url: str) -> Sample:
    """Fetch a metrics page. Raises OSError when there is none."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return parse(answer.read().decode(), time.monotonic())


def parse(page: str, at: float) -> Sample:
    """The metrics of the language models on `page` that are loaded."""
    models: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            if name.startswith(_PREFIXES) and "le" not in labels:
                model = labels.get("model") or labels.get("model_name") or "?"
                models[model][name.partition(":")[2].removesuffix("_total")] += value
    # The server keeps what a frontend that died had on the page, until it ends itself.
    gone = {model for model, values in models.items() if values.get(_FRONTENDS) == 0}
    return Sample(at, {model: dict(values) for model, values in models.items() if model not in gone})


def table(before: Sample, now: Sample) -> Table:
    """Rates and means are over the time between the two samples."""
    heads = ("model", "running", "waiting", "KV use", "hits", "prompt/s", "tokens/s", "TTFT", "ITL", "preempted")
    columns = [Column(head, no_wrap=head != "model", overflow="fold") for head in heads]  # 80 characters are enough
    out = Table(*columns, box=SIMPLE, padding=0, show_edge=False, caption="TTFT and ITL in ms")
    for model, values in sorted(now.models.items()):
        grown = _Growth(values, before.models.get(model, {}), now.at - before.at)
        out.add_row(
            model,
            f"{values.get('num_requests_running', 0):.0f}",
            f"{values.get('num_requests_waiting', 0):.0f}",
            f"{values.get('kv_cache_usage_perc', 0):.0%}",
            grown.share("prefix_cache_hits", "prefix_cache_queries"),
            grown.rate("prompt_tokens"),
            grown.rate("generation_tokens"),
            grown.mean_ms("time_to_first_token_seconds"),
            grown.mean_ms("inter_token_latency_seconds"),
            f"{values.get('num_preemptions', 0):.0f}",
        )
    return out


class _Growth(msgspec.Struct, frozen=True):
    """What one model's metrics did between two samples, as cells of the table; "-" where nothing happened."""

    now: dict[str, float]
    before: dict[str, float]
    seconds: float

    def rate(self, name: str) -> str:
        return f"{self._of(name) / self.seconds:.0f}" if self.seconds > 0 else "-"

    def share(self, part: str, whole: str) -> str:
        return f"{self._of(part) / self._of(whole):.0%}" if self._of(whole) else "-"

    def mean_ms(self, histogram: str) -> str:
        count = self._of(f"{histogram}_count")
        return f"{self._of(f'{histogram}_sum') / count * 1e3:.1f}" if count else "-"

    def _of(self, name: str) -> float:
        return self.now.get(name, 0.0) - self.before.get(name, 0.0)
