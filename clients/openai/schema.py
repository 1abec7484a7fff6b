"""What a request may hold. Fields that the API or vLLM knows and this server cannot honour are refused with the reason
(`refuse`, `_ELSEWHERE`), never dropped, but for values that ask for nothing. Unknown fields are left to `fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from clients.openai.body import List, Strict, Text
from clients.openai.constraints import constraint_of
from clients.openai.errors import invalid, unsupported, unsupported_in
from clients.openai.predicted import Prediction
from clients.openai.trace import REQUEST_ID
from engine.text.chat_template import MAX_SOURCE
from engine.types import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_SALT,
    MAX_STOP_BYTES,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
# The engine's own bounds, in characters here: a request is refused before it is sent on n times.
Stop = Annotated[str, Field(max_length=MAX_STOP_BYTES)]
Stops = Annotated[List[Stop], Field(max_length=MAX_STOP_STRINGS)]
Template = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_BYTES)]


# vLLM's fields that this server cannot honour: the values besides null that ask for nothing, and why no other is taken.
_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "best_of": (1, "in chat every answer is returned; send `n`."),
    "documents": ([], "write the documents into a message."),
    "mm_processor_kwargs": ({}, "the models served here read text."),
    "media_io_kwargs": ({}, "the models served here read text."),
    "spaces_between_special_tokens": (True, "special tokens are joined as the tokenizer joins them."),
    "detokenize": (True, "the answer is text; `return_token_ids` adds the ids."),
    "kv_transfer_params": ({}, "blocks are not moved between servers."),
    "vllm_xargs": ({}, "no extensions of vLLM's are here."),
    "logits_processors": ([], "use `logit_bias` or `allowed_token_ids`."),
    "truncation_side": ("left", "`truncate_prompt_tokens` keeps the last tokens."),
    "store": (False, "nothing is stored here."),
    "chat_template": (None, "it belongs to chat."),
    "prompt_embeds": (None, "send text or token ids."),
    "thinking_token_budget": (None, "it belongs to chat, whose template shows where thinking begins."),
    "lora_request": (None, "adapters are not served here."),
    "lora_name": (None, "adapters are not served here."),
}


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk.")
    include_obfuscation: bool | None = None

    @model_validator(mode="after")
    def _refuse(self) -> StreamOptions:
        if self.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "chunks are sent as they are, without padding.")
        return self


class SchemaFormat(Strict):
    """What response_format carries with json_schema. An answer keeps to the schema whatever `strict` says."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="With json_object.")
    format: dict[str, Any] | None = Field(None, description="Of a structural tag: xgrammar's formats.")
    structures: List[dict[str, Any]] | None = Field(None, description="Of a structural tag: its older form.")
    triggers: List[str] | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise invalid("response_format.json_schema", "json_schema goes with type 'json_schema', which needs it.")
        if self.schema_ is not None and self.type != "json_object":
            raise invalid("response_format.schema", "schema goes with type 'json_object'; json_schema holds its own.")
        if self.type != "structural_tag":
            for name in ("format", "structures", "triggers"):
                if getattr(self, name) is not None:
                    raise invalid(f"response_format.{name}", f"{name} goes with type 'structural_tag'.")
        return self


class Sampling(Strict):
    """The fields that completions and chat share."""

    model: Annotated[str, Field(min_length=1, description="A name from GET /v1/models.")]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 or -1 is off.")] | None = None
    min_p: Unit | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[List[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)] | None = Field(
        None, description="Token id (as a string) to a bias added to its logit."
    )
    bad_words: Annotated[List[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[List[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep only the last so many tokens of the prompt."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Tokens of log-probabilities as `token_id:ID`.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = Field(
        None, description="Only requests with the same salt share what is in the prefix cache."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description="Lower goes first.")
    timeout: Annotated[float, Field(gt=0.0)] | None = Field(None, description="Deadline in seconds.")
    user: str | None = Field(None, description="Written to the access log.")
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = Field(
        None, description="As the header X-Request-Id, which wins: the answer's id holds it."
    )
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = Field(None, description="The likeliest answers, by as many beams as `n`.")
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = Field(None, description="Of a beam search.")
    early_stopping: bool | None = Field(None, description="Of a beam search.")
    speculation: dict[str, Any] | None = Field(None, description='{"method": "none"}: nothing is drafted for it.')
    structured_outputs: dict[str, Any] | str | None = Field(
        None, description="vLLM's: json, regex, choice, grammar or structural_tag."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Any = None

    @model_validator(mode="after")
    def _combinations(self) -> Sampling:
        extra = self.__pydantic_extra__ or {}
        for name in [name for name in extra if name in _ELSEWHERE]:
            neutral, why = _ELSEWHERE[name]
            if extra.pop(name) not in (None, neutral):
                raise unsupported(name, why)
        constraint_of(self)
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise unsupported(name, "it belongs to beam search: send `use_beam_search` too.")
        if self.stop is not None and "" in ([self.stop] if isinstance(self.stop, str) else self.stop):
            raise invalid("stop", "stop cannot contain an empty string.")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "`stream_options` can only be used when `stream` is True.")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "`prompt_logprobs` is only available when `stream` is false.")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def beams(self) -> int:
        """Beams of a beam search, whose answers come as one; 0 without one. A single beam is greedy."""
        return self.num_choices if self.use_beam_search else 0

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[List[Text], Field(min_length=1)]
        | Annotated[List[TokenId], Field(min_length=1)]
        | Annotated[List[Annotated[List[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.suffix:
            raise unsupported("suffix", "the models served here continue text; they do not fill in the middle.")
        if self.best_of is not None:
            if self.best_of < self.num_choices:
                raise invalid("best_of", f"`best_of` ({self.best_of}) must be at least `n` ({self.num_choices}).")
            if self.stream and self.best_of > self.num_choices and not self.use_beam_search:
                raise invalid("best_of", "`best_of` greater than `n` cannot be streamed: the best is known at the end.")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "`max_tokens` 0 is only allowed with `echo`: nothing would be returned.")
        if self.echo and self.stream and self.logprobs is not None:
            raise invalid("echo", "`echo` with `logprobs` needs the prompt's log-probabilities; set `stream` to false.")
        return self

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    @property
    def num_candidates(self) -> int:
        """Answers that come from the model; of a beam search the best alone do."""
        return self.num_choices if self.use_beam_search else self.best_of or self.num_choices

    @property
    def beams(self) -> int:
        return (self.best_of or self.num_choices) if self.use_beam_search else 0

    @property
    def echo_logprobs(self) -> bool:
        """The prompt's tokens come back one by one, with their log-probabilities."""
        return bool(self.echo and self.logprobs is not None)


class TextPart(Strict):
    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> TextPart:
        if self.type not in ("text", "refusal"):
            raise unsupported_in("messages", f"a content part of type {self.type!r}; the models served here read text.")
        if [name for name, value in vars(self).items() if value is not None and name != "type"] != [self.type]:
            raise invalid("messages", f"a content part of type {self.type!r} needs the field {self.type!r} alone.")
        return self

    @property
    def words(self) -> str:
        return self.text or self.refusal or ""


class FunctionCall(Strict):
    name: Annotated[str, Field(min_length=1)]
    arguments: str = Field(description="A JSON object as a string.")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One turn. `reasoning_content`, or `reasoning`, is what an earlier answer carried; templates that know it render
    it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[TextPart] | None = None
    name: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.function_call is not None:
            raise unsupported("messages", "`function_call` is the deprecated form; send `tool_calls`.")
        if self.audio is not None or self.annotations:
            raise unsupported_in("messages", "audio and annotations; the models served here read text.")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise invalid("messages", f"a {self.role} message needs `content`.")
        if self.role != "assistant" and (self.tool_calls or self.thinking or self.refusal):
            raise invalid("messages", "only assistant messages carry tool_calls, reasoning_content or refusal.")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise invalid("messages", "`tool_call_id` belongs to tool messages, and each of them needs it.")
        return self

    @property
    def thinking(self) -> str | None:
        return self.reasoning_content or self.reasoning

    @property
    def text(self) -> str:
        """The content, its parts a line each."""
        return "\n".join(part.words for part in self.content) if isinstance(self.content, list) else self.content or ""


class FunctionSpec(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: Template | None = Field(None, description="Where the shim takes one: Jinja, for this request.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Tokens after which thinking is closed for the model."
    )
    echo: bool | None = Field(None, description="With continue_final_message: repeat the message being continued.")
    safety_identifier: str | None = Field(None, description="Written to the access log.")
    prompt_cache_key: str | None = Field(None, description="Requests with equal keys go to the same replica.")
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        None, description="Labels of stored completions; nothing is stored here."
    )
    modalities: List[str] | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A variable of the chat template; says nothing to one that does not know it."
    )
    verbosity: str | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    prediction: Prediction | None = Field(None, description="What the answer is predicted to be: it comes faster.")
    prompt_cache_options: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        refuse(self)
        if self.max_tokens == 0:
            raise invalid("max_tokens", "`max_tokens` must be at least 1.")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "`top_logprobs` can only be used when `logprobs` is True.")
        if self.continue_final_message:
            check_continued(self.messages, self.add_generation_prompt)
        elif self.echo:
            raise invalid("echo", "in chat, `echo` repeats the message being continued: set `continue_final_message`.")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise invalid("tools", "two tools have the same name.")
        if self.tool_choice in ("auto", "required") and not names:
            raise invalid("tool_choice", "`tool_choice` needs `tools`.")
        must = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        if must and constraint_of(self) is not None:
            raise invalid("tool_choice", "an answer that must be a call can be nothing else: send no format of it.")
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                raise invalid("tool_choice", f"no tool is named {self.tool_choice.function.name!r}.")
            if self.continue_final_message:
                raise invalid("tool_choice", "a named tool cannot be forced while a message is continued.")
        if self.parallel_tool_calls is False and not names:
            raise invalid("parallel_tool_calls", "`parallel_tool_calls` needs `tools`.")

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """The chat template's variables besides those that every template has."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        return {"reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})}

    @property
    def active_tools(self) -> list[Tool]:
        """The tools that the model is shown: none with tool_choice 'none'."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def forced_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None


def check_continued(messages: list[Message], add_generation_prompt: bool | None) -> None:
    """Raises ApiError when the last message cannot be continued."""
    if add_generation_prompt:
        raise invalid("continue_final_message", "it excludes `add_generation_prompt`: no new turn is opened.")
    if messages[-1].role != "assistant" or messages[-1].content is None:
        raise invalid("continue_final_message", "the last message must be the assistant's, with `content`.")


def refuse(request: ChatRequest) -> None:
    """Fields of the API whose meaning this server cannot give. Values that ask for nothing are let through."""
    harmless: dict[str, tuple[Any, str]] = {
        "store": ((None, False), "nothing is stored here."),
        "modalities": ((None, ["text"]), "the models served here write text."),
        "service_tier": ((None, "auto", "default"), "there is one tier; `priority` orders requests."),
        "prompt_cache_retention": ((None, "in_memory", "in-memory"), "prefixes stay while blocks last."),
        "verbosity": ((None, "medium"), "the models served here have no such setting."),
        "audio": ((None,), "the models served here write text."),
        "functions": ((None, []), "it is the deprecated form; send `tools`."),
        "function_call": ((None,), "it is the deprecated form; send `tool_choice`."),
        "moderation": ((None,), "no moderation model is served here."),
        "prompt_cache_options": ((None,), "the prefix cache is automatic; see `prompt_cache_key`."),
        "web_search_options": ((None,), "no search is attached."),
    }
    for name, (allowed, why) in harmless.items():
        if getattr(request, name) not in allowed:
            raise unsupported(name, why)


_OF_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


class TokenizeRequest(Strict):
    """POST /tokenize: `prompt`, or `messages` through the model's chat template."""

    model: Annotated[str, Field(min_length=1)] | None = Field(None, description="Not needed with one model.")
    prompt: Text | None = None
    messages: Annotated[List[Message], Field(min_length=1)] | None = None
    tools: List[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "send either `prompt` or `messages`.")
        if self.prompt is not None:
            for name in _OF_MESSAGES:
                if getattr(self, name) is not None:
                    raise invalid(name, f"`{name}` goes with `messages`.")
        if self.messages is not None and self.continue_final_message:
            check_continued(self.messages, self.add_generation_prompt)
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Annotated[str, Field(min_length=1)] | None = Field(None, description="Not needed with one model.")
    tokens: List[TokenId]
    skip_special_tokens: bool | None = None
