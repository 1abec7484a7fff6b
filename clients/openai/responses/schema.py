"""What a request of the Responses API may hold (https://platform.openai.com/docs/api-reference/responses).

Fields that ask for something that this server cannot give are refused with the reason, values that ask for nothing are
taken. Unknown fields are left to `clients.openai.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from clients.openai.body import List, Strict, Text
from clients.openai.errors import invalid, unsupported, unsupported_in

LOGPROBS = "message.output_text.logprobs"
# Thinking goes out as it is, so there is nothing that a client would need encrypted.
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


class Part(Strict):
    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Part:
        if self.type not in ("input_text", "output_text", "text", "refusal"):
            raise unsupported_in("input", f"a content part of type {self.type!r}; the models served here read text.")
        if self.words is None:
            raise invalid("input", f"a content part of type {self.type!r} needs its text.")
        if self.text is not None and self.refusal is not None:
            raise invalid("input", f"a content part of type {self.type!r} holds both text and refusal.")
        return self

    @property
    def words(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | List[Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None

    @model_validator(mode="after")
    def _refuse(self) -> CallItem:
        if self.namespace:
            raise unsupported_in("input", "a function call with a namespace: functions stand in none here.")
        return self


class CallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | List[Part]
    id: str | None = None
    status: str | None = None


class ReasoningText(Strict):
    type: str
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: List[ReasoningText] | None = None
    content: List[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None

    @model_validator(mode="after")
    def _refuse(self) -> ReasoningItem:
        if self.encrypted_content:
            raise unsupported_in("input", "encrypted reasoning: this server encrypts none and reads none.")
        return self


class OtherItem(Strict):
    """Calls of tools that run on a server, references to items, images: known to the API and not read here."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> OtherItem:
        raise unsupported_in(
            "input", f"an item of type {self.type!r}; messages, function calls, their outputs and reasoning are read."
        )


_READ = frozenset({"message", "function_call", "function_call_output", "reasoning"})


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) and kind in _READ else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    type: str
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> FunctionTool:
        if self.type != "function":
            raise unsupported_in("tools", f"type {self.type!r}; functions of the client's own are the tools here.")
        if self.name is None:
            raise invalid("tools", "a function needs `name`.")
        return self


class ChosenTool(Strict):
    """One function, or those that are allowed."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: List[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChosenTool:
        if self.type == "function" and self.name is None:
            raise invalid("tool_choice", "the type 'function' needs `name`.")
        if self.type == "allowed_tools" and not self.tools:
            raise invalid("tool_choice", "the type 'allowed_tools' needs `tools`.")
        return self

    @property
    def allowed(self) -> set[str]:
        return {str(tool.get("name")) for tool in self.tools or ()}


class Reasoning(Strict):
    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Reasoning:
        for name in ("summary", "generate_summary"):
            if getattr(self, name) not in (None, "auto"):
                raise unsupported(f"reasoning.{name}", "thinking goes out as the model writes it, without a summary.")
        return self


class Form(Strict):
    """As chat has it: `schema` goes with json_object as well."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Form:
        if self.schema_ is not None and self.type == "text":
            raise invalid("text.format.schema", "schema goes with type 'json_schema' or 'json_object'.")
        for name in ("name", "description", "strict"):
            if getattr(self, name) not in (None, False) and self.type != "json_schema":
                raise invalid(f"text.format.{name}", f"{name} goes with type 'json_schema'.")
        return self


class TextConfig(Strict):
    format: Form | None = None
    verbosity: str | None = None


class StreamOptions(Strict):
    include_obfuscation: bool | None = None

    @model_validator(mode="after")
    def _refuse(self) -> StreamOptions:
        if self.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "events are sent as they are, without padding.")
        return self


# The values besides null that ask for nothing, and why no other is taken.
_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "background": (False, "a response is made while its client waits."),
    "conversation": (None, "send `previous_response_id`, or the items."),
    "prompt": (None, "prompts are not stored here."),
    "truncation": ("disabled", "a conversation is taken whole or refused."),
    "context_management": ([], "the conversation is taken as it is sent."),
    "moderation": (None, "no moderation model is served here."),
    "image": (None, "the models served here read text."),
    "prompt_cache_options": (None, "the prefix cache is automatic; see `prompt_cache_key`."),
    "access_programs": (None, "there are none here."),
    "background_options": (None, "a response is made while its client waits."),
}


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: Annotated[str, Field(min_length=1, description="A name from GET /v1/models.")]
    input: Text | Annotated[List[Item], Field(min_length=1)]
    instructions: Text | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = Field(None, description="Keep the response for `previous_response_id`; true by default.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(None, description="Of tools that run on a server: none.")
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: List[str] | None = None
    tools: List[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    user: str | None = Field(None, description="Written to the access log.")
    safety_identifier: str | None = Field(None, description="Written to the access log.")
    prompt_cache_key: str | None = Field(None, description="Requests with equal keys go to the same replica.")
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    prompt_cache_options: Any = None
    access_programs: Any = None
    background_options: Any = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        for name, (neutral, why) in _ELSEWHERE.items():
            if getattr(self, name) not in (None, neutral):
                raise unsupported(name, why)
        for name in self.include or ():
            if name not in _INCLUDED:
                raise unsupported_in(
                    "include", f"{name!r}: the tools here are the client's own, and text is all there is."
                )
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "`stream_options` can only be used when `stream` is True.")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
