"""A request of the Responses API as a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from clients.openai.errors import invalid
from clients.openai.responses.schema import (
    CallItem,
    CallOutputItem,
    ChosenTool,
    Form,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesRequest,
)
from clients.openai.schema import ChatRequest

ChatMessage = dict[str, Any]


def chat_request(request: ResponsesRequest, earlier: Sequence[ChatMessage]) -> ChatRequest:
    """The same request for POST /v1/chat/completions, behind the messages of the conversation so far. Raises ApiError
    for what chat refuses."""
    messages = [*earlier, *input_messages(request)]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "stream": request.stream,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "service_tier": request.service_tier,
    }
    if request.wants_logprobs:
        body["logprobs"], body["top_logprobs"] = True, request.top_logprobs or 0
    effort = request.reasoning.effort if request.reasoning else None
    if effort == "none":
        body["chat_template_kwargs"] = {"enable_thinking": False}
    elif effort is not None:
        body["reasoning_effort"] = effort
    if request.text is not None:
        body["verbosity"] = request.text.verbosity
        if request.text.format is not None:
            body["response_format"] = _format(request.text.format)
    return ChatRequest.model_validate(body | _tools(request))


def input_messages(request: ResponsesRequest) -> list[ChatMessage]:
    """The request's own items as chat messages."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    return chat_messages(request.input)


def chat_messages(items: Iterable[Any]) -> list[ChatMessage]:
    """Items as chat messages. Reasoning, text and calls that follow one another are one turn of the assistant's."""
    messages: list[ChatMessage] = []
    turn: ChatMessage | None = None  # the assistant's, open
    for item in items:
        said = isinstance(item, CallItem | ReasoningItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if not said:
            turn = None
        elif turn is None:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, CallItem) and turn is not None:
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem) and turn is not None:
            thought = "".join(part.text for part in item.content or item.summary or ())
            if thought:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        elif isinstance(item, MessageItem) and turn is not None:
            turn["content"] += _text(item.content)
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.words or "" for part in content)


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    choice: Any = request.tool_choice
    tools = list(request.tools or ())
    if isinstance(choice, ChosenTool) and choice.type == "allowed_tools":
        unknown = choice.allowed - {str(tool.name) for tool in tools}
        if unknown:
            raise invalid("tool_choice", f"allows {min(unknown)!r}, which is none of `tools`.")
        tools = [tool for tool in tools if tool.name in choice.allowed]
        choice = choice.mode or "auto"
    elif isinstance(choice, ChosenTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    if not tools:
        # Clients of this API send the default of either with every request.
        return {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    functions = [
        {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters", "strict"})}
        for tool in tools
    ]
    body = {"tools": functions, "tool_choice": choice, "parallel_tool_calls": request.parallel_tool_calls}
    return {name: value for name, value in body.items() if value is not None}


def _format(form: Form) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type} if form.schema_ is None else {"type": form.type, "schema": form.schema_}
    schema = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}
