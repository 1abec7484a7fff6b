"""How a POST's body becomes a checked request: one pass of pydantic's own JSON parser over the bytes.

FastAPI would parse the body into Python objects, resolve dependencies and check the objects then, which takes several
times as long. It still makes the OpenAPI page from the same endpoints.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from clients.openai.body_values import check_values
from clients.openai.errors import ApiError, from_validation
from clients.openai.trace import trace_of

_MAX_MISTAKES = 1000

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


class JsonRoute(APIRoute):
    """A route whose endpoint takes (http: Request, body: a pydantic model); other endpoints are FastAPI's."""

    def get_route_handler(self) -> Any:
        model = get_type_hints(self.endpoint).get("body")
        if model is None:
            return super().get_route_handler()
        return _handler(model, self.endpoint)


def _handler(model: type[BaseModel], endpoint: Callable[..., Awaitable[Response]]) -> Handler:
    async def handle(http: Request) -> Response:
        return await endpoint(http, checked(model, await json_of(http), http))

    return handle


async def json_of(http: Request) -> bytes:
    """The body, which says that it is JSON. Raises ApiError."""
    data = await http.body()
    if not data:
        raise ApiError(400, "The request body is missing; send a JSON object.", code="invalid_json")
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"The request body is encoded ({encoding}): send it as it is, without Content-Encoding.")
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, f"The request body must be JSON sent as application/json, not as {kind or 'nothing'}.")
    return data


def checked(model: type[M], data: bytes, http: Request) -> M:
    """The request that `data` holds, its model by its own name. Raises ApiError."""
    check_values(data)
    try:
        body = model.model_validate_json(data)
    except ValidationError as error:
        if error.error_count() > _MAX_MISTAKES:  # each would be made a dict of, only to show the first
            raise ApiError(400, f"The request body holds {error.error_count()} mistakes; see /docs.") from None
        raise from_validation(error.errors(include_url=False)) from None
    state = http.app.state
    trace_of(http).ignored_fields = state.unknown_fields.take_out(body, http.query_params)
    name = getattr(body, "model", None)
    if isinstance(name, str):
        body.model = state.named(name)  # type: ignore[attr-defined]
    return body
