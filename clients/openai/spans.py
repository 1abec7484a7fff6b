"""Requests of the shim as spans, in the trace that a caller brings or in one of their own."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace as api
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from clients.openai.trace import Trace
from engine.serving.frontend import otlp

_MAX_STATE = 512  # characters of a caller's tracestate, as W3C has it


class ShimSpans:
    """A span from a request's arrival to its end. Raises ValueError for what is no endpoint."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        self._provider = otlp.provider(endpoint, "nereid-openai", ratio)
        self._tracer = self._provider.get_tracer("nereid")
        self._context = TraceContextTextMapPropagator()

    def begin(self, trace: Trace, headers: Mapping[str, str]) -> None:
        """The span of a request, and in `trace.headers` what those who work for it are told of it."""
        told = {
            name: value for name in ("traceparent", "tracestate") if len(value := headers.get(name, "")) <= _MAX_STATE
        }
        span = self._tracer.start_span("request", self._context.extract(told), SpanKind.SERVER)
        self._context.inject(trace.headers, api.set_span_in_context(span))
        trace.span = span

    def end(self, trace: Trace, method: str, path: str, status: int) -> None:
        """path: a route, which are few."""
        span = trace.span
        if span is None or not span.is_recording():
            return
        span.update_name(f"{method} {path}")
        span.set_attributes(
            {
                "http.request.method": method,
                "http.route": path,
                "http.response.status_code": status,
                "nereid.request_id": trace.request_id,
                "nereid.caller": trace.caller,
            }
        )
        if trace.model != "-":
            span.set_attribute("gen_ai.request.model", trace.model)
        if trace.usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", trace.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", trace.usage.completion_tokens)
        if trace.first_token_s is not None:
            span.set_attribute("nereid.time_to_first_token_s", trace.first_token_s)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
