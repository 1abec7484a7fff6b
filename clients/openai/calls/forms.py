"""The forms by name: how each is read, begun for the model and described by a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clients.openai.calls import sections
from clients.openai.calls.blocks import DsmlParser, FunctionGemmaParser, GemmaParser, XmlParser
from clients.openai.calls.harmony import HarmonyReader
from clients.openai.calls.pythonic import PythonParser
from clients.openai.calls.sections import SectionParser
from clients.openai.tools import HERMES_OPEN, HermesParser, LlamaParser, ToolParser

if TYPE_CHECKING:
    from clients.openai.schema import Tool

_NAME, _NUMBER = "\0", "\1"  # in `opening`, where the call's name and number stand


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    opening: what a call begins with, up to its arguments' `{`; "" where arguments are no JSON, so that no call can
        be begun for the model nor held to a schema.
    closing: what follows the arguments.
    begin, end: around all calls of an answer; between: two of them.
    trigger: text that only calls begin with; "" where calls are the whole answer.
    special: the markers may be special tokens, which the engine must leave in the text.
    constrained: a grammar can ask for the markers.
    """

    parser: Callable[[list[Tool]], ToolParser]
    opening: str = ""
    closing: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    trigger: str = ""
    special: bool = False
    constrained: bool = True

    def prefix(self, name: str) -> str:
        """The beginning of an answer that calls `name`, to put in front of what the model writes."""
        return self.begin + self._named(name).replace(_NUMBER, "0") + "{"

    def rule(self, name: str) -> str:
        """The beginning of a call of `name`, up to its arguments, in Lark's notation."""
        return " /[0-9]{1,2}/ ".join(json.dumps(part) for part in self._named(name).split(_NUMBER))

    def _named(self, name: str) -> str:
        quoted = f'"{_NAME}"' in self.opening
        written = self.opening.replace(f'"{_NAME}"', json.dumps(name)) if quoted else self.opening
        return written.replace(_NAME, name)


def _names(tools: list[Tool]) -> list[str]:
    return [tool.function.name for tool in tools]


def _xml(tools: list[Tool]) -> ToolParser:
    return XmlParser({tool.function.name: tool.function.parameters or {} for tool in tools})


def _section(section: sections.Section, opening: str, closing: str, between: str = "") -> Form:
    return Form(
        parser=lambda tools: SectionParser(section),
        opening=opening,
        closing=closing,
        begin=section.begin,
        end=section.end,
        between=between,
        trigger=section.begin,
        special=True,
        constrained=section is not sections.MISTRAL,  # its marker is a special token that no grammar can name
    )


FORMS: dict[str, Form] = {
    "hermes": Form(
        parser=lambda tools: HermesParser(),
        opening=f'{HERMES_OPEN}\n{{"name": "{_NAME}", "arguments": ',
        closing="}\n</tool_call>",
        between="\n",
        trigger=HERMES_OPEN,
    ),
    "llama3": Form(
        parser=lambda tools: LlamaParser(_names(tools)),
        opening=f'{{"name": "{_NAME}", "parameters": ',
        closing="}",
        between="; ",
    ),
    "qwen3-coder": Form(parser=_xml, constrained=False),
    "pythonic": Form(parser=lambda tools: PythonParser(_names(tools)), constrained=False),
    "mistral": _section(sections.MISTRAL, f"{_NAME}[ARGS]", ""),
    "deepseek-v3": _section(
        sections.DEEPSEEK_V3,
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
    ),
    "deepseek-v3.1": _section(
        sections.DEEPSEEK_V31, f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ),
    "deepseek-v3.2": Form(parser=lambda tools: DsmlParser(), special=True, constrained=False),
    "gemma4": Form(parser=lambda tools: GemmaParser(), special=True, constrained=False),
    "functiongemma": Form(parser=lambda tools: FunctionGemmaParser(), special=True, constrained=False),
    "gpt-oss": Form(parser=lambda tools: HarmonyReader(_names(tools)), special=True, constrained=False),
    "kimi-k2": _section(
        sections.KIMI_K2,
        f"<|tool_call_begin|>functions.{_NAME}:{_NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
}
