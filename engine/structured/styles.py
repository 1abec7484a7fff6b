"""Styles of arguments: the names under which clients ask for them, xgrammar's and ours, and the marks of each."""

from __future__ import annotations

from dataclasses import dataclass

KEY = "\0"  # in an opening, where the argument's name stands


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments one behind the other.

    opening, text_opening: what is before a value that is JSON, and one that is text as it stands. closing: what is
    behind. Lines of their own are optional where newline is set.
    """

    opening: str
    closing: str
    text_opening: str = ""
    newline: bool = False


@dataclass(frozen=True, slots=True)
class Quoted:
    """Objects and lists as in JSON but for bare keys, strings between two marks."""

    mark: str


JSON = "json"
PYTHON = "python"  # KEY=VALUE, with commas between, values as in JSON
_DSML = "｜DSML｜"
STYLES: dict[str, Pairs | Quoted] = {
    "qwen_xml": Pairs(f"<parameter={KEY}>", "</parameter>", newline=True),
    "minimax_xml": Pairs(f'<parameter name="{KEY}">', "</parameter>"),
    "deepseek_xml": Pairs(
        f'<{_DSML}parameter name="{KEY}" string="false">',
        f"</{_DSML}parameter>",
        f'<{_DSML}parameter name="{KEY}" string="true">',
    ),
    "glm_xml": Pairs(f"<arg_key>{KEY}</arg_key>\n<arg_value>", "</arg_value>"),
    "gemma": Quoted('<|"|>'),
    "functiongemma": Quoted("<escape>"),
}
NAMES = (JSON, *STYLES, PYTHON)
XML = "qwen_xml"
XML_FORMAT = "qwen_xml_parameter"  # an older format, which is that style
