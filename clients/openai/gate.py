"""Everything that happens to a request before an endpoint sees it: identity, keys, size, share, log line.

A plain ASGI wrapper: streamed chunks pass through one function call, nothing is buffered on the way out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clients.openai.config import ShimConfig
from clients.openai.encode import error_response
from clients.openai.errors import CLIENT_CLOSED, ApiError
from clients.openai.fields import HEADER
from clients.openai.metrics import ShimMetrics
from clients.openai.request_log import RequestLog
from clients.openai.restrictions import Restrictions
from clients.openai.stream import ClientGone
from clients.openai.trace import REQUEST_ID, Trace
from engine import heap

if TYPE_CHECKING:
    from clients.openai.spans import ShimSpans

log = logging.getLogger("nereid.openai.access")

_BODY_S = 60
_LARGE_BODY = 1 << 20
_TRIM_AFTER_S = 0.1

OPEN_PATHS = frozenset(
    {
        "/",
        "/health",
        "/health/generate",
        "/health/ready",
        "/ping",
        "/version",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/favicon.ico",
    }
)
_ADMIN_PATH = re.compile(r"/reset_prefix_cache|/v1/models/.*/(un)?load", re.DOTALL)


class Keys:
    """The accepted API keys. Every key is compared, in constant time, whatever was sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def find(self, given: bytes) -> int | None:
        """The number of the key that `given` is."""
        digest = hashlib.sha256(given).digest()
        found = None
        for number, known in enumerate(self._digests):
            if hmac.compare_digest(known, digest):
                found = number
        return found

    def __bool__(self) -> bool:
        return bool(self._digests)


class Gate:
    """paths: those that the application serves; others count as "unknown", or labels for made-up ones would pile up."""

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        config: ShimConfig,
        metrics: ShimMetrics,
        spans: ShimSpans | None = None,
        requests: RequestLog | None = None,
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._config = config
        self._metrics = metrics
        self._spans = spans
        self._requests = requests
        self._keys = Keys(config.api_keys)
        self._admin_keys = Keys(config.admin_keys)
        self._restrictions = Restrictions(config.restrictions)
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # GET without its body, which the server leaves out
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        named = re.search(REQUEST_ID, given) is not None
        trace = Trace(given if named else uuid.uuid4().hex, named)
        scope["nereid.trace"] = trace
        if self._spans is not None:
            self._spans.begin(trace, headers)
        answer = _Answer(send, trace)
        self._metrics.open_requests.inc()
        counted = False
        try:
            trace.caller = self._caller(scope, headers)
            if self._counts(scope):
                self._enter(trace.caller)
                counted = True
            try:
                with anyio.fail_after(_BODY_S):  # a task of its own, as asyncio.wait_for takes one, costs more
                    body = await self._body(scope, headers, receive)
            except TimeoutError:
                raise ApiError(408, f"The request body did not arrive within {_BODY_S} seconds.") from None
            await self._app(scope, body, answer.send)
        except ApiError as error:
            answer.status = error.status
            if not isinstance(error, ClientGone):
                await error_response(error, scope)(scope, receive, answer.send)
        except Exception:
            if not answer.whole:  # else the connection is as good as after any other answer
                raise
        finally:
            if counted:
                self._leave(trace.caller)
            self._metrics.open_requests.dec()
            self._metrics.count_relayed()
            self._finish(method, scope, trace, CLIENT_CLOSED if trace.gone else answer.status)
            if trace.body_bytes > _LARGE_BODY:
                # Objects made of it are freed with this call; 200 MB stayed with the allocator.
                asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        asyncio.get_running_loop().run_in_executor(None, heap.trim_malloc)

    def _caller(self, scope: Scope, headers: Headers) -> str:
        """Who asks: the number of its key, the group whose header it has, or its address. Raises ApiError 401, 403."""
        group = self._restrictions.admits(scope["path"], headers)
        if group is not None:
            return group
        address = scope["client"][0] if scope.get("client") else "-"
        admin = _ADMIN_PATH.fullmatch(scope["path"]) is not None
        keys = self._admin_keys if admin else self._keys
        if admin and not keys:
            sentence = f"{scope['path']} needs an admin key: start the shim with --admin-key KEY."
            raise ApiError(403, sentence, code="no_admin_key")
        if not keys or scope["path"] in OPEN_PATHS or scope["path"].startswith("/web/"):
            return str(address)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = headers.get("x-api-key", "")  # as clients of the Messages API send it
        if not key:
            raise ApiError(401, "An API key is needed: send `Authorization: Bearer KEY`.", code="missing_api_key")
        number = keys.find(key.strip(" ").encode("latin-1"))  # the bytes that were sent
        if number is None:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return f"admin{number}" if admin else f"key{number}"

    def _counts(self, scope: Scope) -> bool:
        return scope["method"] == "POST" and self._config.max_concurrency_per_key > 0

    def _enter(self, caller: str) -> None:
        limit = self._config.max_concurrency_per_key
        if self._open[caller] >= limit:
            raise ApiError(
                429, f"{limit} requests are open already, the most at one time here.", code="rate_limit_exceeded"
            )
        self._open[caller] += 1

    def _leave(self, caller: str) -> None:
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """`receive` with the whole body read already. Raises ApiError 413, ClientGone."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        limit = self._config.max_body_bytes
        too_large = ApiError(413, f"The request body may hold at most {limit} bytes here.", code="content_too_large")
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > limit:
                raise too_large
        data = b"".join(chunks)
        scope["nereid.trace"].body_bytes = size
        if self._requests is not None:
            scope["nereid.trace"].body = data
        whole: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _finish(self, method: str, scope: Scope, trace: Trace, status: int) -> None:
        route = scope.get("route")
        path = getattr(route, "path", scope["path"])
        path = path if path in self._paths else "unknown"
        self._metrics.requests.labels(path, str(status)).inc()
        if self._spans is not None:
            self._spans.end(trace, method, path, status)
        if self._requests is not None and method == "POST":
            self._requests.write(trace, method, path, status)
        if status == CLIENT_CLOSED:
            self._metrics.disconnects.inc()
        if trace.model != "-" and status == 200:
            self._metrics.duration.labels(path).observe(trace.seconds)
            if trace.first_token_s is not None:
                self._metrics.first_token.observe(trace.first_token_s)
        usage = trace.usage
        log.log(
            logging.INFO if status < 500 or status == CLIENT_CLOSED else logging.WARNING,
            "%s %s %d %.1fms id=%s caller=%s model=%s user=%r prompt=%d generated=%d ttft=%s",
            method,
            quote(scope["path"]),  # a line break in it must not break the line
            status,
            trace.seconds * 1000,
            trace.request_id,
            trace.caller,
            trace.model,
            trace.user[:128],
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            "-" if trace.first_token_s is None else f"{trace.first_token_s * 1000:.1f}ms",
        )


class _Answer:
    """Watches what is sent: the status for the log, the request's id and its ignored fields for the client."""

    def __init__(self, send: Send, trace: Trace) -> None:
        self._send = send
        self._trace = trace
        self.status = 500
        self.whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            number = self._trace.request_id.encode()
            told = [(b"x-request-id", number), (b"request-id", number)]  # Anthropic's SDKs read the second
            if self._trace.ignored_fields:
                told.append((HEADER.lower().encode(), ", ".join(self._trace.ignored_fields).encode()))
            message["headers"] = [*message.get("headers", ()), *told]
        await self._send(message)
        self.whole = message["type"] == "http.response.body" and not message.get("more_body", False)
