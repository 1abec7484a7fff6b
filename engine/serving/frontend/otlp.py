"""Spans to an OpenTelemetry collector, over HTTP as JSON.

The SDK's own exporter needs a protobuf that tritonclient 2.50 excludes; OTLP's JSON needs none. The rest is the SDK's:
contexts, sampling, batches on a thread with a bounded queue.
Format: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

logger = logging.getLogger("nereid.otlp")

_PATH = "/v1/traces"
_POST_S = 5.0
_COMPLAIN_S = 60.0
_SERVICE = "service.name"


def provider(endpoint: str, service: str, ratio: float = 1.0) -> TracerProvider:
    """Where tracers come from. endpoint: a collector's, http://HOST:4318. ratio: of requests without a trace of their
    own that are traced; others follow the trace they bring. Raises ValueError."""
    made = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create({_SERVICE: service}),
        shutdown_on_exit=False,
    )
    made.add_span_processor(BatchSpanProcessor(JsonExporter(traces_url(endpoint))))
    return made


def traces_url(endpoint: str) -> str:
    """Where spans are posted. Raises ValueError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{endpoint!r} is not the URL of an OpenTelemetry collector, such as http://localhost:4318")
    return endpoint if parts.path.endswith(_PATH) else endpoint.rstrip("/") + _PATH


class JsonExporter(SpanExporter):
    """What a collector does not take is lost, with a line in the log once a minute."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._complained = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        data = json.dumps(payload(spans)).encode()
        request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_POST_S):
                return SpanExportResult.SUCCESS
        except (OSError, ValueError) as error:
            if time.monotonic() - self._complained > _COMPLAIN_S:
                self._complained = time.monotonic()
                logger.warning("%s does not take spans (%s): they are lost", self._url, error)
            return SpanExportResult.FAILURE


def payload(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """The body of a post."""
    by_resource: dict[int, tuple[ReadableSpan, list[dict[str, Any]]]] = {}
    for span in spans:
        by_resource.setdefault(id(span.resource), (span, []))[1].append(_span(span))
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(first.resource.attributes)},
                "scopeSpans": [{"scope": {"name": "nereid"}, "spans": made}],
            }
            for first, made in by_resource.values()
        ]
    }


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    made: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        made["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.status.description:
        made["status"]["message"] = span.status.description
    return made


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}
