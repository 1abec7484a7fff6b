"""The shim's own metrics. Engine metrics are on each tritonserver's metrics port."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_AT_ONCE = 64


class ShimMetrics:
    """Counters of one worker, or of all of them when prometheus_client's multiprocess folder is set."""

    def __init__(self, multiprocess_folder: str | None = None) -> None:
        self.registry = CollectorRegistry()
        self._folder = multiprocess_folder
        self._uncounted = 0
        self.requests = Counter(
            "nereid_openai_requests", "Requests answered", ["path", "status"], registry=self.registry
        )
        self.open_requests = Gauge(
            "nereid_openai_open_requests", "Requests being served", registry=self.registry, multiprocess_mode="livesum"
        )
        self.first_token = Histogram(
            "nereid_openai_time_to_first_token_seconds",
            "From the request's arrival to its first generated token",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.duration = Histogram(
            "nereid_openai_request_seconds",
            "From the request's arrival to its end",
            ["path"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.tokens = Counter("nereid_openai_generated_tokens", "Tokens relayed to clients", registry=self.registry)
        self.retries = Counter("nereid_openai_retries", "Requests moved to another replica", registry=self.registry)
        self.disconnects = Counter(
            "nereid_openai_client_disconnects", "Requests cancelled since the client went away", registry=self.registry
        )
        self.replica_up = Gauge(
            "nereid_openai_replica_up",
            "1 while a tritonserver is ready",
            ["replica"],
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )

    def relayed(self, tokens: int) -> None:
        """Count tokens, many at once: a counter's lock costs more than all else that is done here for a token."""
        self._uncounted += tokens
        if self._uncounted >= _AT_ONCE:
            self.count_relayed()

    def count_relayed(self) -> None:
        self.tokens.inc(self._uncounted)
        self._uncounted = 0

    def exposition(self) -> bytes:
        """Prometheus text format."""
        if self._folder is None:
            return generate_latest(self.registry)
        everyone = CollectorRegistry()
        multiprocess.MultiProcessCollector(everyone, path=self._folder)
        return generate_latest(everyone)
