"""JSON bodies, encoded by msgspec: several times faster than the standard library on the hot path."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from clients.openai.errors import ApiError


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)
