"""What a request of the Messages API may hold (https://docs.anthropic.com/en/api/messages).

Fields that ask for something that this server cannot give are refused with the reason. Unknown fields are left to
`clients.openai.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from clients.openai.body import List, Strict
from clients.openai.errors import invalid, unsupported, unsupported_in
from clients.openai.schema import Stop, Unit
from engine.types import MAX_STOP_STRINGS

# Prefixes are cached whether a request marks them or not, so a mark is taken as it is.
Mark = dict[str, Any] | None
Sequences = Annotated[List[Annotated[Stop, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: Mark = None
    citations: list[Any] | None = None

    @model_validator(mode="after")
    def _refuse(self) -> TextBlock:
        if self.citations:
            raise unsupported("citations", "answers of the models served here cite nothing.")
        return self


class ThinkingBlock(Strict):
    """What an earlier answer carried. Nothing is signed here, and no signature is checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: Mark = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: str | List[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Mark = None


class OtherBlock(Strict):
    """Images, documents, results of tools that run on a server: known to the API and not to the models served here."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> OtherBlock:
        raise unsupported_in("messages", f"a content block of type {self.type!r}; the models served here read text.")


_READ = frozenset({"text", "thinking", "tool_use", "tool_result"})


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) and kind in _READ else "other"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind),
]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: str | List[Block]

    @model_validator(mode="after")
    def _check(self) -> Turn:
        if isinstance(self.content, str):
            return self
        kinds = {block.type for block in self.content}
        if self.role == "user" and kinds & {"thinking", "tool_use"}:
            raise invalid("messages", "only assistant messages carry thinking and tool_use blocks.")
        if self.role == "assistant" and "tool_result" in kinds:
            raise invalid("messages", "only user messages carry tool_result blocks.")
        return self


class ToolSpec(Strict):
    """A tool of the client's. Tools with another `type` run on Anthropic's servers."""

    type: str | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Mark = None

    @model_validator(mode="after")
    def _check(self) -> ToolSpec:
        if self.type not in (None, "custom"):
            raise unsupported_in(
                "tools", f"type {self.type!r} is a tool of Anthropic's; tools here are the client's own."
            )
        if self.input_schema is None:
            raise invalid("tools", f"the tool {self.name!r} needs `input_schema`.")
        return self


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise invalid("tool_choice", "`name` belongs to the type 'tool', which needs it.")
        return self


class Thinking(Strict):
    """budget_tokens: tokens after which thinking is closed for the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = Field(None, description="`omitted` leaves thinking out.")

    @model_validator(mode="after")
    def _check(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise invalid("thinking.budget_tokens", "`budget_tokens` belongs to the type 'enabled'.")
        if self.type == "between_tools":
            raise unsupported("thinking.type", "a model thinks where its chat template lets it; send 'adaptive'.")
        return self


class Metadata(Strict):
    user_id: Annotated[str, Field(max_length=256)] | None = None


class Conversation(Strict):
    """What /v1/messages and /v1/messages/count_tokens share."""

    model: Annotated[str, Field(min_length=1, description="A name from GET /v1/models.")]
    messages: Annotated[List[Turn], Field(min_length=1)]
    system: str | List[TextBlock] | None = None
    tools: List[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = Field(None, description="`effort`, and `format` with a JSON schema.")
    mcp_servers: list[Any] | None = None
    context_management: Any = None
    cache_control: Mark = None

    @model_validator(mode="after")
    def _refuse(self) -> Conversation:
        if self.mcp_servers:
            raise unsupported("mcp_servers", "tools here are the client's own.")
        if self.context_management:
            raise unsupported("context_management", "the conversation is taken as it is sent.")
        unknown = set(self.output_config or {}) - {"effort", "format"}
        if unknown:
            raise unsupported(f"output_config.{min(unknown)}", "`effort` and `format` are what this server knows.")
        return self


_ELSEWHERE = {
    "container": "nothing is run on this server for a client.",
    "diagnostics": "the access log and the metrics say what happened to a request.",
    "inference_geo": "requests are served where this server stands.",
    "user_profile_id": "there are no profiles here; `metadata.user_id` is written to the access log.",
    "workspace_id": "there are no workspaces here.",
}


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Sequences | None = None
    stream: bool | None = None
    temperature: Unit | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = Field(None, description="`user_id` is written to the access log.")
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> MessagesRequest:
        if self.speed == "fast":
            raise unsupported("speed", "there is one speed; `priority` of the OpenAI API orders requests.")
        for name, why in _ELSEWHERE.items():
            if getattr(self, name) is not None:
                raise unsupported(name, why)
        return self
