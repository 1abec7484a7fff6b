"""What each request took in the engine, as spans of the trace that it belongs to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.serving.frontend import otlp
from engine.serving.frontend.metrics import Figures
from engine.serving.frontend.stream import Stream, now
from engine.serving.link import protocol

_ENDED_BADLY = ("error", "rejected")


class EngineSpans:
    """`nereid.request` with `queue`, `prefill` and `decode` in it, written when a request ends. Safe to use from any
    thread."""

    def __init__(self, endpoint: str, model: str) -> None:
        """Raises ValueError for what is no endpoint."""
        self._provider = otlp.provider(endpoint, "nereid-engine")
        self._tracer = self._provider.get_tracer("nereid")
        self._model = model
        self._read = TraceContextTextMapPropagator().extract

    def finished(self, stream: Stream, reason: str, figures: Figures | None) -> None:
        """A request has ended. figures: None when it gave no token."""
        end, clock = time.time_ns(), now()

        def at(moment: float) -> int:
            return end - int((clock - moment) * 1e9)

        attributes: dict[str, Any] = {"gen_ai.request.model": self._model, "nereid.request_id": stream.request_id}
        attributes["gen_ai.response.finish_reasons"] = [reason]
        parent = self._read(stream.trace)
        span = self._tracer.start_span(
            "nereid.request", parent, SpanKind.SERVER, attributes, start_time=at(stream.arrived)
        )
        if not span.is_recording():
            return
        if figures is not None:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": figures.num_prompt,
                    "gen_ai.usage.output_tokens": figures.num_generated,
                    "gen_ai.request.max_tokens": figures.max_tokens,
                    "nereid.cached_tokens": figures.num_prompt - figures.num_computed,
                }
            )
            inside = trace.set_span_in_context(span)
            moments = [stream.first_heard - figures.prefill_s - figures.queue_s, stream.first_heard - figures.prefill_s]
            moments += [stream.first_heard, stream.first_heard + figures.decode_s]
            for place, name in enumerate(("queue", "prefill", "decode")):
                part = self._tracer.start_span(f"nereid.{name}", inside, start_time=at(moments[place]))
                part.end(at(moments[place + 1]))
        if reason in _ENDED_BADLY:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    @staticmethod
    def context_of(request: Any, parameters: Mapping[str, Any]) -> dict[str, str]:
        """The trace of a Triton request: the server's own, where it traces for OpenTelemetry, else what the request's
        parameters say."""
        of = getattr(request, "trace", None)
        told = of().get_context() if of is not None else None
        found = json.loads(told) if told else parameters
        return {name: str(found[name]) for name in protocol.TRACE_PARAMETERS if name in found}

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
