"""A conversation of the Messages API as a chat request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from clients.openai.errors import invalid, unsupported
from clients.openai.messages.schema import (
    Conversation,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from clients.openai.schema import ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: Conversation) -> ChatRequest:
    """The same request for POST /v1/chat/completions. Raises ApiError for what chat refuses.

    A conversation that ends with the assistant's turn has that turn continued. Stop sequences stay in the text, so
    that the answer can say which of them was met.
    """
    body: dict[str, Any] = {"model": request.model, "messages": list(_messages(request))}
    if request.messages[-1].role == "assistant":
        body["continue_final_message"] = True
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in request.tools
        ]
    if request.tool_choice is not None:
        body["tool_choice"] = _choice(request.tool_choice)
        if request.tool_choice.disable_parallel_tool_use and request.tools:
            body["parallel_tool_calls"] = False
    if request.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.thinking.type != "disabled"}
        body["include_reasoning"] = request.thinking.display != "omitted"
        body["thinking_token_budget"] = request.thinking.budget_tokens
    output = request.output_config or {}
    if output.get("effort") is not None:
        body["reasoning_effort"] = output["effort"]
    if output.get("format") is not None:
        body["response_format"] = _format(output["format"])
    if isinstance(request, MessagesRequest):
        body |= _sampling(request)
    return ChatRequest.model_validate(body)


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": request.max_tokens, "stream": request.stream}
    for name in ("temperature", "top_p", "top_k"):
        fields[name] = getattr(request, name)
    if request.stop_sequences:
        fields["stop"] = list(request.stop_sequences)
        fields["include_stop_str_in_output"] = True
    if request.metadata is not None:
        fields["user"] = request.metadata.user_id
    return fields


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _format(form: Any) -> Any:
    """{"type": "json_schema", "schema": {...}} with the name that chat's form has."""
    if isinstance(form, dict) and form.get("type") == "json_schema":
        unknown = set(form) - {"type", "schema"}
        if unknown:
            raise unsupported(f"output_config.format.{min(unknown)}", "`type` and `schema` are what this server knows.")
        if not isinstance(form.get("schema"), dict):
            raise invalid("output_config.format.schema", "a JSON schema, as an object, must stand here.")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}
    return form


def _messages(request: Conversation) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    for turn in request.messages:
        yield from _user(turn) if turn.role == "user" else [_assistant(turn)]


def _user(turn: Turn) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, before the text beside them."""
    if isinstance(turn.content, str):
        yield {"role": "user", "content": turn.content}
        return
    texts = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        elif isinstance(block, TextBlock):
            texts.append(block)
    if texts or not turn.content:
        yield {"role": "user", "content": _text(texts)}


def _result(block: ToolResultBlock) -> str:
    """What a tool gave. Chat templates have no mark for failure, so the text says it."""
    text = _text(block.content or "")
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def _assistant(turn: Turn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _text([block for block in turn.content if isinstance(block, TextBlock)]),
    }
    thinking = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
    if thinking:
        message["reasoning_content"] = thinking
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
