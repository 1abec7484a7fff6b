"""What answers look like, for the OpenAPI page. Answers are built as plain dictionaries; tests hold them to this."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class TokenDetails(Answer):
    cached_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Words(Answer):
    prompt: str


_WHY = {
    400: "The request is refused; the message says why",
    401: "No API key, or a wrong one",
    403: "The path needs an admin key, and the shim was started without one",
    404: "No such model or path",
    413: "The request body is too large",
    429: "Too many open requests for this key",
    500: "The shim or the engine failed",
    503: "No replica can take the request now; see Retry-After",
    504: "The request's deadline passed",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": why} for status, why in _WHY.items()
}


def _streamed(event: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    said = "The answer; with `stream` true, its chunks as server-sent events"
    return {200: {"description": said, "content": {"text/event-stream": {"schema": event}}}, **ERRORS}


_TEXT = {"type": "string"}
STREAMED = _streamed(_TEXT)
# Events with a name besides their data.
STREAMED_BY_NAME = _streamed({"type": "object", "properties": {"event": _TEXT, "data": _TEXT}})
