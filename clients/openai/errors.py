"""Errors in the API's own shape: {"error": {message, type, param, code}}, and the status each cause gets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.types import MAX_MESSAGE, shown

RETRY_AFTER_S = 1
CLIENT_CLOSED = 499

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    CLIENT_CLOSED: "client_closed_request",
    500: "server_error",
    501: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_FROM_TRITON = {
    "INVALID_ARG": 400,
    "INVALID_ARGUMENT": 400,
    "UNSUPPORTED": 400,
    "UNIMPLEMENTED": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": CLIENT_CLOSED,
}


_ENGINE_PREFIX = re.compile(r"^sampling_parameters: ")
_TOO_LONG = re.compile(r"the prompt (has \d+ tokens, but the context holds|of \d+ bytes has \d+ tokens or more)")
_FIRST_WORD = re.compile(r"\w+")
_PROMPT = "prompt"
# what the engine and the models of a repository call a request's field, where the API has another name
_ENGINE_FIELDS = {
    "text_input": _PROMPT,
    "input_ids": _PROMPT,
    "prompt_ids": _PROMPT,
    "token_ids": _PROMPT,
    "bad_word_ids": "bad_words",
}
_REQUEST_FIELDS = frozenset(
    {
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "stop",
        "seed",
        "structured_outputs",
        "tools",
    }
)


class ApiError(Exception):
    """An answer other than 200. The message is for the person who sent the request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status = status
        self.message = shown(message, MAX_MESSAGE)
        self.param = None if param is None else shown(param)
        super().__init__(self.message)
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class BackendError(Exception):
    """What Triton answered instead of a result.

    code: its status name (INVALID_ARG, UNAVAILABLE ...). message: for the client. detail: for the log only, where the
    message leaves out addresses. refused: the engine itself says so; else the server or the way to it failed.
    again: the same replica may well serve the request that it has just failed.
    """

    def __init__(
        self, code: str, message: str, detail: str | None = None, refused: bool = False, again: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail or message
        self.refused = refused
        self.again = again

    @property
    def retryable(self) -> bool:
        """True when another replica may well serve the same request."""
        return self.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")

    def to_api(self, prompt: str = "prompt") -> ApiError:
        """prompt: the field that the request's prompt stands in."""
        status = _FROM_TRITON.get(self.code, 500)
        if status == 400:
            return _engine_refusal(self.message, prompt)
        code = "engine_overloaded" if self.refused else "backend_unavailable"
        return ApiError(status, self.message, code=code if status == 503 else None)


def _engine_refusal(message: str, prompt: str) -> ApiError:
    """What the engine or the tokenizer says of a request, with the API's name of the field it speaks of.

    A prompt that is too long has the code that clients look for to shorten it.
    """
    message = _ENGINE_PREFIX.sub("", message)
    if _TOO_LONG.match(message):
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    word = _FIRST_WORD.match(message)
    field = _ENGINE_FIELDS.get(word[0], word[0]) if word else ""
    if field == _PROMPT:
        return ApiError(400, f"{prompt}{message[len(word[0]) :]}" if word else message, param=prompt)
    return ApiError(400, message, param=field if field in _REQUEST_FIELDS else None, code="invalid_value")


def unsupported(param: str, why: str) -> ApiError:
    """A field the API knows and this server cannot honour."""
    return ApiError(400, f"`{param}` is not supported: {why}", param=param, code="unsupported_parameter")


def unsupported_in(param: str, what: str) -> ApiError:
    """A part of a field that is honoured otherwise."""
    return ApiError(400, f"`{param}` holds what is not supported: {what}", param=param, code="unsupported_parameter")


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


_UNION_BRANCH = re.compile(r"(str|int|float|bool|literal|list|dict|function-|constrained|nullable)|[A-Z]|.*\[")


def parameter_name(location: Iterable[str | int]) -> str | None:
    """('body', 'messages', 0, 'role') -> 'messages[0].role'. pydantic's names of union branches end it."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif name and _UNION_BRANCH.match(part):
            break
        elif part not in ("body", "query", "path", "header"):
            name += f".{part}" if name else part
    return name or None


def from_validation(problems: Iterable[Mapping[str, Any]]) -> ApiError:
    """What pydantic found first, as one sentence that names the field. Branches of a union are one problem."""
    found = list(problems)
    problem = found[0]
    kind, message = problem.get("type", ""), str(problem.get("msg", "invalid request"))
    if kind == "json_invalid":
        detail = problem.get("ctx", {}).get("error", message)
        return ApiError(400, f"The request body is not valid JSON: {detail}", code="invalid_json")
    param = parameter_name(problem.get("loc", ()))
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        if param is None:
            return ApiError(400, "The request body is missing; send a JSON object.", code="invalid_json")
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if param is None:
        return ApiError(400, f"The request body must be a JSON object sent as application/json: {message}")
    branches = [str(p.get("msg")) for p in found if parameter_name(p.get("loc", ())) == param]
    message = ", or ".join(dict.fromkeys(branches))
    return ApiError(400, f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")
