"""The forms by name: how each is read, begun for the model and described by a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clients.openai.calls import sections
from clients.openai.calls.blocks import DsmlParser, FunctionGemmaParser, GemmaParser, XmlParser
from clients.openai.calls.harmony import HarmonyReader
from clients.openai.calls.ids import Rename, nine_letters, numbered_functions
from clients.openai.calls.pythonic import PythonParser
from clients.openai.calls.sections import SectionParser
from clients.openai.tools import HERMES_OPEN, HermesParser, LlamaParser, ToolParser

if TYPE_CHECKING:
    from clients.openai.schema import Tool

_NAME, _NUMBER, _BLOCK = "\0", "\1", "\2"  # where a call's name and number, and the name of all calls' block stand


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    opening: what a call begins with, up to its arguments. closing: what follows them. style: how they are written, a
        name of the engine's styles.
    begin, end: around all calls of an answer, in any of `blocks`; between: two calls; lead: what may come before all.
    trigger: text that only calls begin with; "" where calls are the whole answer, and `first` is their first letter.
    special: the markers may be special tokens, which the engine must leave in the text.
    channels: an answer is messages, of which a call is one and the last.
    ids: makes what turns the ids of a conversation's calls into those that the template has; None where it has any.
    """

    parser: Callable[[list[Tool]], ToolParser]
    opening: str = ""
    closing: str = ""
    style: str = "json"
    begin: str = ""
    end: str = ""
    blocks: tuple[str, ...] = ("",)
    between: str = ""
    lead: str = ""
    trigger: str = ""
    first: str = ""
    special: bool = False
    channels: bool = False
    number: str = _NUMBER
    ids: Callable[[], Rename] | None = None

    @property
    def begun(self) -> bool:
        """The prompt can hold the beginning of a call, up to its arguments' brace."""
        return self.style == "json" and not self.channels

    def prefix(self, name: str) -> str:
        """The beginning of an answer that calls `name`, to put in front of what the model writes."""
        return self.begin + self.named(name).replace(_NUMBER, "0") + "{"

    def named(self, name: str) -> str:
        """The beginning of a call of `name`."""
        quoted = self.style == "json" and f'"{_NAME}"' in self.opening
        written = self.opening.replace(f'"{_NAME}"', json.dumps(name)) if quoted else self.opening
        return written.replace(_NAME, name)

    @staticmethod
    def in_block(text: str, block: str) -> str:
        return text.replace(_BLOCK, block)


def _names(tools: list[Tool]) -> list[str]:
    return [tool.function.name for tool in tools]


def _xml(tools: list[Tool]) -> ToolParser:
    return XmlParser({tool.function.name: tool.function.parameters or {} for tool in tools})


def _section(
    section: sections.Section,
    opening: str,
    closing: str,
    between: str = "",
    ids: Callable[[], Rename] | None = None,
) -> Form:
    return Form(
        parser=lambda tools: SectionParser(section),
        opening=opening,
        closing=closing,
        begin=section.begin,
        end=section.end,
        between=between,
        trigger=section.begin,
        special=True,
        ids=ids,
    )


def _bare(parser: Callable[[], ToolParser], opening: str, closing: str, style: str) -> Form:
    return Form(
        parser=lambda tools: parser(),
        opening=f"{opening}call:{_NAME}",
        closing=closing,
        style=style,
        trigger=opening,
        special=True,
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
        first="{",
    ),
    "qwen3-coder": Form(
        parser=_xml,
        opening=f"<tool_call>\n<function={_NAME}>\n",
        closing="</function>\n</tool_call>",
        style="qwen_xml",
        between="\n",
        trigger="<tool_call>",
    ),
    "pythonic": Form(
        parser=lambda tools: PythonParser(_names(tools)),
        opening=f"{_NAME}(",
        closing=")",
        style="python",
        begin="[",
        end="]",
        between=", ",
        first="[",
    ),
    "mistral": _section(sections.MISTRAL, f"{_NAME}[ARGS]", "", "[TOOL_CALLS]", ids=nine_letters),
    "deepseek-v3": _section(
        sections.DEEPSEEK_V3,
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
    ),
    "deepseek-v3.1": _section(
        sections.DEEPSEEK_V31, f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ),
    "deepseek-v3.2": Form(  # its block has one name in V3.2 and another in V4
        parser=lambda tools: DsmlParser(),
        opening=f'<｜DSML｜invoke name="{_NAME}">\n',
        closing="</｜DSML｜invoke>\n",
        style="deepseek_xml",
        begin=f"<｜DSML｜{_BLOCK}>\n",
        end=f"</｜DSML｜{_BLOCK}>",
        blocks=("function_calls", "tool_calls"),
        lead="\n\n",
        trigger=f"<｜DSML｜{_BLOCK}>",
        special=True,
    ),
    "gemma4": _bare(GemmaParser, "<|tool_call>", "<tool_call|>", "gemma"),
    "functiongemma": _bare(FunctionGemmaParser, "<start_function_call>", "<end_function_call>", "functiongemma"),
    "gpt-oss": Form(
        parser=lambda tools: HarmonyReader(_names(tools)),
        opening=f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>",
        closing="<|call|>",
        special=True,
        channels=True,
    ),
    "kimi-k2": _section(
        sections.KIMI_K2,
        f"<|tool_call_begin|>functions.{_NAME}:{_NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        ids=numbered_functions,
    ),
}
