"""What is known about one HTTP request: for the access log and the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from clients.openai.usage import Usage

REQUEST_ID = r"^[\x21-\x7e]{1,128}$"  # a client's: it goes into headers and lines of a log


@dataclass
class Trace:
    """Filled by the gate (request_id, caller) and by the endpoint. named: the client gave the id."""

    request_id: str
    named: bool = False
    caller: str = "-"
    model: str = "-"
    user: str = "-"
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    usage: Usage | None = None
    ignored_fields: tuple[str, ...] = ()  # unknown to the schema
    headers: dict[str, str] = field(default_factory=dict)  # of OpenTelemetry, for those who work for the request
    span: Any = None
    body_bytes: int = 0
    body: bytes = b""  # of the request, where requests are logged
    gone: bool = False  # the client closed the connection while its answer was being streamed

    def name(self, request_id: str | None) -> None:
        """Take the id of a request's body. One of the header X-Request-Id stays, as with vLLM."""
        if request_id is not None and not self.named:
            self.request_id, self.named = request_id, True

    def token_came(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.started

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def trace_of(request: Request) -> Trace:
    trace = request.scope["nereid.trace"]
    assert isinstance(trace, Trace)
    return trace
