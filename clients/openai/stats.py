"""Live engine gauges for the web page and for people with curl, read from each replica's metrics port."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from clients.openai.router import ReplicaState, Router

GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "preemptions",
}
_FRESH_S = 0.5


class Stats:
    """One answer serves everyone who asks within half a second."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._http = httpx.AsyncClient(timeout=2.0)
        self._lock = asyncio.Lock()
        self._read_at = 0.0
        self._body: dict[str, Any] = {}

    async def close(self) -> None:
        await self._http.aclose()

    async def body(self) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                replicas = await asyncio.gather(*(self._replica(r) for r in self._router.replicas))
                self._body = {"time": time.time(), "replicas": replicas}
                self._read_at = time.monotonic()
            return self._body

    async def _replica(self, replica: ReplicaState) -> dict[str, Any]:
        models: dict[str, dict[str, float]] = {}
        try:
            page = await self._http.get(replica.server.address.metrics_url)
            page.raise_for_status()
            models = read_gauges(page.text)
        except (httpx.HTTPError, ValueError):
            pass  # a replica without a metrics port still serves; its gauges are empty
        return {
            "replica": replica.name,
            "ready": bool(replica.ready),
            "ready_models": sorted(replica.ready),
            "open_requests": replica.open_requests,
            "models": models,
        }


def read_gauges(text: str) -> dict[str, dict[str, float]]:
    """model -> gauge -> value, out of Prometheus text."""
    models: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = GAUGES.get(sample.name)
            model = sample.labels.get("model") or sample.labels.get("model_name")
            if name is not None and model is not None:
                gauges = models.setdefault(model, {})
                gauges[name] = gauges.get(name, 0.0) + sample.value
    return models
