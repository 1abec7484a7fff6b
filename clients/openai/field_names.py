"""What each API calls a field that chat or the engine refuses: the client reads of the field that it sent."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clients.openai.errors import ApiError

# Of each path, the field that the request's prompt stands in.
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/messages/count_tokens": "messages",
    "/detokenize": "tokens",
}
# Requests of these become chat requests: chat's name of a field, and theirs.
_RESPONSES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "verbosity": "text.verbosity",
}
_MESSAGES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}


def prompt_field(path: str) -> str:
    return _PROMPTS.get(path, "prompt")


def renamed(error: ApiError, path: str) -> ApiError:
    """The same error with the names of the API that `path` belongs to."""
    names = _names(path)
    head = re.match(r"\w+", error.param or "")
    if head is None or head[0] not in names:
        return error
    told = names[head[0]]
    # Only where the message names the field: elsewhere "stop" and "user" are words.
    message = re.sub(rf"(^|[`'\"]){head[0]}\b", rf"\g<1>{told}", error.message, count=1)
    return ApiError(error.status, message, param=f"{told}{(error.param or '')[head.end() :]}", code=error.code)


def _names(path: str) -> Mapping[str, str]:
    if path.startswith("/v1/responses"):
        return _RESPONSES
    return _MESSAGES if path.startswith("/v1/messages") else {}
