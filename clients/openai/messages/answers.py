"""What answers of the Messages API look like, for the OpenAPI page."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import BaseModel

from clients.openai.answers import ERRORS, STREAMED_BY_NAME, Answer
from clients.openai.wire import ModelInfo


class MessageUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(Answer):
    input_tokens: int


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


MESSAGES: dict[int | str, dict[str, Any]] = {
    200: STREAMED_BY_NAME[200],
    **{status: {**said, "model": MessageError} for status, said in ERRORS.items()},
}


def listed(name: str, info: ModelInfo, started: int) -> dict[str, Any]:
    """What Anthropic's SDKs read of a model of GET /v1/models, beside what OpenAI's read. started: Unix time."""
    return {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(started, timezone.utc).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": info.max_model_len,
        "max_tokens": info.max_model_len,
    }
