"""What answers of the Responses API look like, for the OpenAPI page."""

from __future__ import annotations

from typing import Any, Literal

from clients.openai.answers import Answer


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    usage: ResponseUsage


class InputTokensAnswer(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedAnswer(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemsAnswer(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
