"""A request is one trace, from the shim through the server to the engine, at a collector that stands in for others'."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.python.local_server import LocalServer
from engine.demo import make as demo
from engine.serving.frontend.spans import EngineSpans
from engine.serving.launch import repository
from tests.clients.conftest import Shim, until

pytestmark = pytest.mark.xdist_group("openai")

PARTS = ("queue", "prefill", "decode")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP, as JSON."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.services: list[str] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                collector.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *told: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, body: dict[str, Any]) -> None:
        for resource in body["resourceSpans"]:
            named = {item["key"]: item["value"] for item in resource["resource"]["attributes"]}
            self.services.append(named["service.name"]["stringValue"])
            self.spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]

    def named(self, name: str, trace: str = TRACE) -> dict[str, Any]:
        (found,) = [span for span in self.spans if (span["name"], span["traceId"]) == (name, trace)]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_request_is_one_trace(tmp_path: Path, collector: Collector) -> None:
    demo.make(tmp_path / "demo")
    models = tmp_path / "models"
    repository.add(tmp_path / "demo", "demo", models, settings={}, tokenizer=True, ensemble=False, frontends=1)
    with LocalServer(models, flags=("--otlp-endpoint", collector.url)) as server:
        triton = f"{server.grpc}:{server.metrics.rsplit(':', 1)[1]}"
        shim = Shim(tmp_path, "--triton", triton, "--otlp-endpoint", collector.url)
        quiet = Shim(tmp_path, "--triton", triton, "--otlp-endpoint", collector.url, "--otlp-ratio", "0")
        try:
            body = {"model": "demo", "prompt": "one two", "max_tokens": 5, "ignore_eos": True}
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            assert httpx.post(f"{shim.url}/v1/completions", json=body, headers=headers).status_code == 200
            assert httpx.post(f"{quiet.url}/v1/completions", json=body).status_code == 200
        finally:
            shim.stop()
            quiet.stop()
        names = {"POST /v1/completions", "nereid.request", "nereid.queue", "nereid.prefill", "nereid.decode"}
        until(lambda: {span["name"] for span in collector.spans if span["traceId"] == TRACE} >= names, 30, "no spans")
    assert {"nereid-openai", "nereid-engine"} <= set(collector.services)
    outer, inner = collector.named("POST /v1/completions"), collector.named("nereid.request")
    assert outer["parentSpanId"] == CALLER
    told = {item["key"]: next(iter(item["value"].values())) for item in outer["attributes"] + inner["attributes"]}
    assert (told["http.response.status_code"], told["gen_ai.usage.output_tokens"]) == ("200", "5")
    parents = [inner["parentSpanId"]] + [collector.named(f"nereid.{part}")["parentSpanId"] for part in PARTS]
    assert parents == [outer["spanId"], *[inner["spanId"]] * 3]
    times = [collector.named(f"nereid.{part}") for part in PARTS]
    moments = [int(span[key]) for span in times for key in ("startTimeUnixNano", "endTimeUnixNano")]
    assert moments == sorted(moments)
    # Of requests without a trace of their own none was to be traced, and the engine keeps to that.
    assert {span["traceId"] for span in collector.spans if span["name"] == "nereid.request"} == {TRACE}


def test_the_servers_own_trace_stands_between_where_it_has_one(collector: Collector) -> None:
    spans = EngineSpans(collector.url, "demo")

    class Request:
        def __init__(self, context: str | None) -> None:
            self._context = context

        def trace(self) -> Request:
            return self

        def get_context(self) -> str | None:
            return self._context

    own, told = f"00-{TRACE}-{CALLER}-01", {"traceparent": f"00-{'1' * 32}-{CALLER}-01"}
    assert spans.context_of(Request(json.dumps({"traceparent": own})), told) == {"traceparent": own}
    assert spans.context_of(Request(None), told) == spans.context_of(object(), told) == told
    assert spans.context_of(object(), {}) == {}
    spans.close()
    for wrong in ("localhost:4318", "ftp://x", ""):
        with pytest.raises(ValueError, match="is not the URL"):
            EngineSpans(wrong, "demo")
