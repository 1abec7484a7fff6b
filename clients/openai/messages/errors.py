"""Errors in the shape of the Messages API (https://docs.anthropic.com/en/api/errors)."""

from __future__ import annotations

from typing import Any

from clients.openai.errors import ApiError

PATHS = "/v1/messages"  # and what stands under it

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
