"""Chat messages to a prompt, with the checkpoint's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.checkpoint_files import checkpoint_folder, read_json_object, read_text, token_string
from engine.types import ErrorCode, RequestError, shown

Message = Mapping[str, Any]

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
MAX_SOURCE = 64 << 10  # characters of a template that a request brings
MAX_TEMPLATES = 1 << 19  # characters of all templates of a checkpoint
_MOST = 300  # characters of what a template says
_CONTINUE_MARK = "\ue000CONTINUE\ue001"  # private-use characters: no text holds them by chance


class ChatTemplate:
    """A checkpoint's chat template, rendered in Jinja's sandbox with the globals that Hugging Face gives it.

    A checkpoint may hold several named templates: `tool_use` renders a request with tools if it exists, `default`
    everything else.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
            self._with_tools = {name for name, source in templates.items() if _names(environment, source, "tools")}
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid Jinja (line {error.lineno}): {shown(str(error.message), _MOST)}"
            ) from error
        except Exception as error:  # Jinja evaluates what is constant, and templates nest as deep as they like
            raise RequestError(f"the chat template cannot be compiled: {_reason(error)}") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, path: str | Path, file: str | Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint folder, or the one in `file`; None when there is none. Raises RequestError when
        it is broken."""
        templates = read_templates(path, file)
        if not templates:
            return None
        return cls(templates, _special_tokens(read_json_object(checkpoint_folder(path) / "tokenizer_config.json")))

    def replaced(self, source: str) -> ChatTemplate:
        """Another template with the same special tokens. Raises RequestError when it is broken or too long."""
        if len(source) > MAX_SOURCE:
            raise RequestError(f"chat_template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        return ChatTemplate({"default": source}, self._special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; tokenize it with `add_special_tokens=False`.

        messages: objects with `role` and `content` (a string, or text parts), as OpenAI's API has them.
        add_generation_prompt: end with the start of an assistant message. continue_final_message: leave the last
        message open instead, so that the model goes on with it; it then comes without a generation prompt.
        template_kwargs: more variables of the template (`enable_thinking`, ...).
        Raises RequestError on messages that cannot be rendered.
        """
        for name in template_kwargs or ():
            if name in _RESERVED:
                raise RequestError(f"chat_template_kwargs must not hold {name}; it is a field of the request itself")
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None and (
                not isinstance(value, list | tuple) or not all(isinstance(v, Mapping) for v in value)
            ):
                raise RequestError(f"{name} must be a list of objects")
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(flag, bool):
                raise RequestError(f"{name} must be true or false")
        chat = [_checked_message(message, n) for n, message in enumerate(messages)]
        if not chat:
            raise RequestError("messages is empty; a chat needs at least one message")
        final = chat[-1].get("content")
        if continue_final_message:
            if not isinstance(final, str):
                raise RequestError("continue_final_message needs a last message with text in its content")
            chat[-1] = {**chat[-1], "content": f"{final}{_CONTINUE_MARK} "}
            add_generation_prompt = False
        text = self._render(
            self._template(bool(tools)),
            {
                **self._special_tokens,
                **(template_kwargs or {}),
                "messages": chat,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _left_open(text) if continue_final_message else text

    def _template(self, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            names = ", ".join(sorted(self._templates))
            raise RequestError(f"this model has no default chat template, only: {names}", ErrorCode.UNSUPPORTED)
        if with_tools and name not in self._with_tools:
            raise RequestError(
                "tools would not reach this model: its chat template has no place for them; describe them in a message",
                ErrorCode.UNSUPPORTED,
            )
        return template

    @staticmethod
    def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return template.render(variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused these messages: {shown(str(error), _MOST)}") from error
        except Exception as error:  # a template computes whatever it likes of what was sent
            raise RequestError(f"the chat template cannot render these messages: {_reason(error)}") from error


def read_templates(path: str | Path, file: str | Path | None = None) -> dict[str, str]:
    """The sources of a checkpoint folder's chat templates by name. Raises RequestError when they cannot be read.

    chat_template.jinja and additional_chat_templates/NAME.jinja come before tokenizer_config.json. file: a template
    that stands in for all of them.
    """
    if file is not None:
        return _bounded({"default": read_text(Path(file))}, Path(file))
    folder = checkpoint_folder(path)
    templates = _templates_of(read_json_object(folder / "tokenizer_config.json").get("chat_template"), folder)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_text(file)
    single = folder / "chat_template.jinja"
    if single.exists():
        templates["default"] = read_text(single)
    return _bounded(templates, folder)


def _bounded(templates: dict[str, str], where: Path) -> dict[str, str]:
    """The same; megabytes of them take 20 s to compile."""
    size = sum(map(len, templates.values()))
    if size > MAX_TEMPLATES:
        raise RequestError(f"the chat templates of {where} have {size} characters; at most {MAX_TEMPLATES} are read")
    return templates


def _reason(error: Exception) -> str:
    """In words: Python's own of an error that says nothing by itself."""
    kinds = {RecursionError: "they nest too deep", MemoryError: "they need too much memory"}
    return kinds.get(type(error)) or shown(str(error), _MOST) or type(error).__name__


def _names(environment: jinja2.Environment, source: str, variable: str) -> bool:
    """Whether a template reads or sets a variable anywhere."""
    return any(node.name == variable for node in environment.parse(source).find_all(nodes.Name))


def _checked_message(message: Message, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{number}] must be an object with a role, a string")
    checked = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") is not None:
        checked["content"] = _content_text(message["content"], number)
    elif calls is None:
        raise RequestError(f"messages[{number}] has no content")
    if calls is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"messages[{number}].tool_calls must be a list")
        checked["tool_calls"] = [_checked_call(call, number) for call in calls]
    return checked


def _content_text(content: Any, number: int) -> str:
    """Text parts put together, a line each: templates of text models read a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"messages[{number}].content must be a string or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"messages[{number}].content holds a part of type {shown(str(kind))}; this model takes text parts only",
                ErrorCode.UNSUPPORTED,
            )
        texts.append(part["text"])
    return "\n".join(texts)


class _Arguments(dict[str, Any]):
    """A call's arguments. Most templates write them out as an object; some add them to text, where they are
    JSON."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _checked_call(call: Any, number: int) -> Any:
    """OpenAI's API carries a call's arguments as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"messages[{number}].tool_calls holds arguments that are not JSON: {error}") from None
    if isinstance(arguments, Mapping):
        arguments = _Arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _left_open(text: str) -> str:
    """`text` up to the end of the final message's content, which the template may have stripped of spaces."""
    end = text.rfind(_CONTINUE_MARK)
    if end < 0:
        raise RequestError(
            "the chat template leaves out the last message, so it cannot be continued; "
            "send it as the prompt of a completion instead",
            ErrorCode.UNSUPPORTED,
        )
    stripped = not text.startswith(" ", end + len(_CONTINUE_MARK))
    return text[:end].rstrip() if stripped else text[:end]


def _templates_of(value: Any, folder: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise RequestError(
            f"chat_template in {folder / 'tokenizer_config.json'} must be a string or a list of "
            "objects with name and template"
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: text for name in config if name.endswith("_token") and (text := token_string(config[name])) is not None
    }


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_plain"), [], [], body).set_lineno(line)

    def _plain(self, caller: Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
