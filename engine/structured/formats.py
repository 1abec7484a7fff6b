"""Structural tags as clients send them: xgrammar's formats, and the older form of structures and triggers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.structured.styles import JSON, XML_FORMAT

MAX_REPEATS = 1000


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    """style: how the value is written, a name of styles.NAMES. any_order: false, as grammars have an order."""

    json_schema: dict[str, Any] | bool
    style: str = JSON
    any_order: bool = False


class XmlArguments(_Format, frozen=True, tag=XML_FORMAT):
    json_schema: dict[str, Any] | bool


class Grammar(_Format, frozen=True, tag="grammar"):
    grammar: str


class Regex(_Format, frozen=True, tag="regex"):
    pattern: str


class AnyText(_Format, frozen=True, tag="any_text"):
    excludes: list[str] = []
    max_tokens: int | None = None


class Sequence(_Format, frozen=True, tag="sequence"):
    elements: Annotated[list[Format], Meta(min_length=1)]


class Or(_Format, frozen=True, tag="or"):
    elements: Annotated[list[Format], Meta(min_length=1)]


class Optional(_Format, frozen=True, tag="optional"):
    content: Format


class Star(_Format, frozen=True, tag="star"):
    content: Format


class Plus(_Format, frozen=True, tag="plus"):
    content: Format


class Repeat(_Format, frozen=True, tag="repeat"):
    content: Format
    min: Annotated[int, Meta(ge=0, le=MAX_REPEATS)]
    max: Annotated[int, Meta(ge=-1, le=MAX_REPEATS)]


class Token(_Format, frozen=True, tag="token"):
    token: int | str


class ExcludeToken(_Format, frozen=True, tag="exclude_token"):
    exclude_tokens: list[int | str] = []


class AnyTokens(_Format, frozen=True, tag="any_tokens"):
    exclude_tokens: list[int | str] = []
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None


class Tag(_Format, frozen=True, tag="tag"):
    begin: str | Token
    content: Format
    end: str | list[str] | Token


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TokenTriggeredTags(_Format, frozen=True, tag="token_triggered_tags"):
    trigger_tokens: Annotated[list[int | str], Meta(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    exclude_tokens: list[int | str] = []
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, frozen=True, tag="dispatch"):
    rules: Annotated[list[tuple[Annotated[str, Meta(min_length=1)], Format]], Meta(min_length=1)]
    loop: bool = True
    excludes: list[str] = []


class TokenDispatch(_Format, frozen=True, tag="token_dispatch"):
    rules: Annotated[list[tuple[int | str, Format]], Meta(min_length=1)]
    loop: bool = True
    exclude_tokens: list[int | str] = []


Format = (
    ConstString
    | JsonSchema
    | XmlArguments
    | Grammar
    | Regex
    | AnyText
    | Sequence
    | Or
    | Optional
    | Star
    | Plus
    | Repeat
    | Token
    | ExcludeToken
    | AnyTokens
    | Tag
    | TriggeredTags
    | TokenTriggeredTags
    | TagsWithSeparator
    | Dispatch
    | TokenDispatch
)


class _Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | str | bool
    end: str


class _Structures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], Meta(min_length=1)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    type: Literal["structural_tag"] = "structural_tag"


# msgspec looks through a type when it first meets it: two threads that do so at once, with types that hold each other,
# end the process. Grammars are compiled on several threads.
for _kind in (_Whole, _Structures):
    msgspec.json.Decoder(_kind)


def parsed(given: Any) -> Format:
    """The format that a structural tag asks for. Raises ValueError with the place of what is unknown or missing."""
    if not isinstance(given, dict):
        raise ValueError("it must be an object with `format`, or with `structures` and `triggers`")
    if "format" in given:
        return msgspec.convert(given, _Whole).format
    if "structures" not in given and "triggers" not in given:
        raise ValueError("it must hold `format`, or `structures` and `triggers`")
    made = msgspec.convert(given, _Structures)
    tags = [Tag(each.begin, JsonSchema(_schema(each.schema)), each.end) for each in made.structures]
    return TriggeredTags(made.triggers, tags)


def _schema(given: dict[str, Any] | str | bool) -> dict[str, Any] | bool:
    schema = msgspec.json.decode(given) if isinstance(given, str) else given
    if not isinstance(schema, dict | bool):
        raise ValueError("structures[].schema must be a JSON schema, or the text of one")
    return schema
