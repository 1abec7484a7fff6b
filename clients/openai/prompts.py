"""What a request wants continued, as the LLM model takes it. Text goes down as text unless its ids are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clients.openai.calls.forms import FORMS
from clients.openai.calls.ids import rename_calls
from clients.openai.constraints import constraint_of
from clients.openai.errors import ApiError, invalid, unsupported
from clients.openai.model_forms import ModelForms
from clients.openai.router import Router
from clients.openai.schema import ChatRequest, CompletionRequest, Message, TokenizeRequest, Tool
from clients.openai.wire import ModelInfo, Prompt

_AT_ONCE = 32  # calls to a tokenizer model
_END = 512  # characters of a rendered conversation that show where its answer begins


@dataclass(frozen=True, slots=True)
class Source:
    """One prompt of a request, and its text when the answer repeats it.

    first_token: the text of its first token, when its tokens are repeated one by one.
    end: the last of a rendered conversation.
    """

    prompt: Prompt
    echo: str = ""
    first_token: str = ""
    end: str = ""


async def completion_sources(router: Router, info: ModelInfo, request: CompletionRequest) -> list[Source]:
    """The prompts of a completion, in order."""
    prompt = request.prompt
    if isinstance(prompt, str):
        texts: list[str] | None = [prompt]
    elif isinstance(prompt[0], str):
        texts = [p for p in prompt if isinstance(p, str)]
    else:
        texts = None
    if texts is not None:
        return await asyncio.gather(*(_text_source(router, info, request, text) for text in texts))
    if request.add_special_tokens is not None:
        raise invalid("add_special_tokens", "`add_special_tokens` goes with a text prompt; ids are taken as they are.")
    lists = [prompt] if isinstance(prompt[0], int) else prompt
    return await asyncio.gather(*(_ids_source(router, info, request, _ids(ids)) for ids in lists))


async def _text_source(router: Router, info: ModelInfo, request: CompletionRequest, text: str) -> Source:
    needs_ids = (
        not text  # nothing, or what the tokenizer puts before every text
        or request.truncate_prompt_tokens is not None
        or request.add_special_tokens is False
        or request.return_token_ids
        or request.echo_logprobs
    )
    if not needs_ids:
        return Source(Prompt(text=text, salt=request.cache_salt), text if request.echo else "")
    ids = await encode_text(router, info, text, request.add_special_tokens is not False)
    if not ids:
        raise invalid("prompt", "the prompt has no tokens: send some text.")
    if request.truncate_prompt_tokens is not None and len(ids) > request.truncate_prompt_tokens:
        return await _ids_source(router, info, request, ids)
    return Source(
        Prompt(ids=tuple(ids), salt=request.cache_salt),
        text if request.echo else "",
        await _first_token(router, info, request, ids),
    )


async def _ids_source(router: Router, info: ModelInfo, request: CompletionRequest, ids: Sequence[int]) -> Source:
    ids = _last(ids, request.truncate_prompt_tokens)
    echo = await decode_ids(router, info, ids, request.skip_special_tokens is not False) if request.echo else ""
    return Source(Prompt(ids=tuple(ids), salt=request.cache_salt), echo, await _first_token(router, info, request, ids))


async def _first_token(router: Router, info: ModelInfo, request: CompletionRequest, ids: Sequence[int]) -> str:
    return await decode_ids(router, info, ids[:1], False) if request.echo_logprobs else ""


async def chat_source(router: Router, info: ModelInfo, request: ChatRequest, forms: ModelForms) -> Source:
    """The conversation through the model's chat template, in ids."""
    if request.add_special_tokens:
        raise unsupported("add_special_tokens", "a chat template writes the special tokens itself.")
    messages = template_messages(request.messages, forms)
    continued = bool(request.continue_final_message)
    begun = forms.begun(request)
    if begun is not None:
        messages.append({"role": "assistant", "content": FORMS[forms.tools].prefix(begun)})
        continued = True
    if forms.channels:
        made = constraint_of(request)
        if not continued and made is not None and made.kind != "structural_tag":
            messages.append({"role": "assistant", "content": ""})  # the channel of text: no other format has channels
            continued = True
    parameters = template_parameters(
        request.active_tools,
        request.add_generation_prompt,
        continued,
        request.template_variables,
        request.chat_template,
    )
    tokenizer = tokenizer_of(info)
    context = None if request.truncate_prompt_tokens is not None else info.max_model_len
    ids, text = await router.ask(info.name, lambda server: server.encode_chat(tokenizer, messages, parameters, context))
    echo = str(messages[-1].get("content") or "") if request.echo else ""
    ids = list(_last(ids, request.truncate_prompt_tokens))
    prompt = Prompt(ids=tuple(ids), affinity=request.prompt_cache_key, salt=request.cache_salt)
    return Source(prompt, echo, end=text[-_END:])


def _name_thinking(messages: list[dict[str, Any]]) -> None:
    """As gpt-oss's template has it, which refuses thinking beside both text and calls."""
    for message in messages:
        if "reasoning_content" in message and not (message.get("tool_calls") and message["content"]):
            message["thinking"] = message["reasoning_content"]


async def tokenize_source(router: Router, info: ModelInfo, request: TokenizeRequest, forms: ModelForms) -> list[int]:
    """Ids of what POST /tokenize sent."""
    if request.prompt is not None:
        return await encode_text(router, info, request.prompt, request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise unsupported("add_special_tokens", "a chat template writes the special tokens itself.")
    messages = template_messages(request.messages or [], forms)
    parameters = template_parameters(
        request.tools or [],
        request.add_generation_prompt,
        bool(request.continue_final_message),
        request.chat_template_kwargs,
        request.chat_template,
    )
    tokenizer = tokenizer_of(info)
    return (await router.ask(info.name, lambda server: server.encode_chat(tokenizer, messages, parameters)))[0]


async def encode_text(router: Router, info: ModelInfo, text: str, add_special_tokens: bool) -> list[int]:
    tokenizer = tokenizer_of(info)
    return await router.ask(info.name, lambda server: server.encode(tokenizer, text, add_special_tokens))


async def decode_ids(router: Router, info: ModelInfo, ids: Sequence[int], skip_special_tokens: bool) -> str:
    if not ids:
        return ""
    tokenizer = tokenizer_of(info)
    return await router.ask(info.name, lambda server: server.decode(tokenizer, ids, skip_special_tokens))


async def token_texts(router: Router, info: ModelInfo, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(token_id: int) -> str:
        async with gate:
            return await decode_ids(router, info, [token_id], False)

    known = dict(zip(dict.fromkeys(ids), await asyncio.gather(*map(one, dict.fromkeys(ids))), strict=True))
    return [known[token_id] for token_id in ids]


def tokenizer_of(info: ModelInfo) -> str:
    """Raises ApiError when the repository has no tokenizer model for this LLM."""
    if info.tokenizer is None:
        raise ApiError(
            400,
            f"The model `{info.name}` has no tokenizer model in its repository, so only a completion's plain text or "
            "token ids can be served. Add one with `nereid add`.",
            param="model",
            code="tokenizer_missing",
        )
    return info.tokenizer


def template_messages(messages: Sequence[Message], forms: ModelForms) -> list[dict[str, Any]]:
    """Messages as chat templates know them: `developer` is the newer name of `system`, parts become one text, and calls
    have the ids of their form."""
    made = [_template_message(message) for message in messages]
    form = FORMS.get(forms.tools)
    if form is not None and form.ids is not None:
        rename_calls(made, form.ids())
    if forms.channels:
        _name_thinking(made)
    return made


def _template_message(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "reasoning"})
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    plain["role"] = "system" if message.role == "developer" else message.role
    if isinstance(message.content, list):
        plain["content"] = message.text
    elif message.content is None:
        plain["content"] = message.refusal or ""
    return plain


def template_parameters(
    tools: Sequence[Tool],
    generation_prompt: bool | None,
    continued: bool,
    variables: dict[str, Any] | None,
    template: str | None = None,
) -> dict[str, Any]:
    parameters: dict[str, Any] = dict(variables or {})
    for name in ("tools", "documents", "messages", "add_generation_prompt", "continue_final_message", "chat_template"):
        if name in parameters:
            raise invalid("chat_template_kwargs", f"{name!r} is a field of the request; leave it out of the variables.")
    if template is not None:
        parameters["chat_template"] = template
    if tools:
        parameters["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    if continued:
        parameters["continue_final_message"] = True
    parameters["add_generation_prompt"] = not continued and generation_prompt is not False
    return parameters


def _ids(value: object) -> list[int]:
    return [i for i in value if isinstance(i, int)] if isinstance(value, list) else []


def _last(ids: Sequence[int], count: int | None) -> Sequence[int]:
    return ids if count is None else ids[-count:]
