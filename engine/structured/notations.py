"""Arguments of a call in the notations that models have beside JSON, as rules from their JSON schema.

In all of them a string stands as it is, with nothing escaped, up to the mark that ends it. Properties come in the
schema's order; others come only where it names none. Raises ValueError with the keyword that a notation has no rule
for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from engine.structured import keywords
from engine.structured import schemas as json_schemas
from engine.structured.lark_rules import ANY_TEXT, Rules, quoted, regex
from engine.structured.string_formats import EXACT, IPV4
from engine.structured.styles import KEY, PYTHON, STYLES, Pairs, Quoted
from engine.types import shown

MAX_DEPTH = 64
MAX_LENGTH = 1 << 16  # characters that a schema may ask of a string
_TEXT = frozenset({"pattern", "minLength", "maxLength", "format"})
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OBJECT = frozenset({"properties", "required", "additionalProperties"})
_ARRAY = frozenset({"items", "minItems", "maxItems"})
_PARTS = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
_KNOWN = _TEXT | _NUMBER | _OBJECT | _ARRAY | _PARTS
_REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "prefixItems",
        "additionalItems",
        "contains",
        "minContains",
        "maxContains",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_DEFINED = ("#/$defs/", "#/definitions/")
_PYTHON_ESCAPES = 'nrbtf\\"'
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_FORMATS = {
    **EXACT,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": IPV4,
    "email": "[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+",
}


def arguments(schema: Any, style: str, rules: Rules) -> str:
    """The expression of an object that the schema accepts. style: a name of STYLES, or PYTHON."""
    keywords.check(schema)
    reader = _Schemas(schema if isinstance(schema, dict) else {})
    top = reader.resolved(schema)
    if set(_types(top)) != {"object"} and "type" in top:
        raise ValueError(f"json_schema.type: arguments in the style {style} are an object")
    _refuse(top, _OBJECT | {"type"}, style)
    notation = STYLES.get(style)
    if isinstance(notation, Quoted):
        return _QuotedValues(notation.mark, reader, rules).value({**top, "type": "object"}, 0)
    properties = _properties(top)
    required = _required(top)
    if notation is None:
        items = [(f"{_python_name(key)} {_json(inner, reader, PYTHON)}", key in required) for key, inner in properties]
        if not items:
            other = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {quoted('=')} {_json(_others(top), reader, PYTHON)}"
            return _map(other, top, '", "')
        return separated(items, '", "', rules)
    write = _PairValues(notation, reader, rules, style)
    if not properties:
        return _map(write.pair(None, _others(top)), top, "")
    pairs = [(write.pair(key, inner), key in required) for key, inner in properties]
    return " ".join(pair if needed else f"({pair})?" for pair, needed in pairs)


def separated(items: list[tuple[str, bool]], between: str, rules: Rules) -> str:
    """Expressions in order with `between` between any two, of which those without True may be left out."""
    if not items:
        return '""'
    some, needed = _some(items, between, rules)
    return some if needed else rules.rule(f'{some} | ""')


def _some(items: list[tuple[str, bool]], between: str, rules: Rules) -> tuple[str, bool]:
    """At least one of them, and whether one is needed. By halves: rules that lead to each other are calls within
    llguidance."""
    if len(items) == 1:
        ((item, needed),) = items
        return rules.rule(item), needed
    half = len(items) // 2
    (left, left_needed), (right, right_needed) = (_some(part, between, rules) for part in (items[:half], items[half:]))
    ways = [f"{left} {between} {right}", *([] if right_needed else [left]), *([] if left_needed else [right])]
    return rules.rule(" | ".join(ways)), left_needed or right_needed


class _Schemas:
    """References within one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def resolved(self, schema: Any, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        """A schema without `$ref`, `allOf` of one part and the like on top."""
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema: {shown(json.dumps(schema))} is no schema that something satisfies")
        for keyword in sorted(_REFUSED & schema.keys()):
            raise ValueError(f"json_schema.{keyword} has no rule in this style: use the style json")
        if schema.get("uniqueItems"):
            raise ValueError("json_schema.uniqueItems cannot be held to")
        inner: Any = None
        if "$ref" in schema:
            name = schema["$ref"]
            if name in seen or len(seen) > MAX_DEPTH:
                raise ValueError(f"json_schema.$ref {shown(repr(name))} refers to itself")
            inner, seen = self._found(name), (*seen, name)
        elif len(schema.get("allOf") or ()) == 1:
            (inner,) = schema["allOf"]
        elif "allOf" in schema:
            raise ValueError("json_schema.allOf of several parts has no rule in this style: use the style json")
        if inner is None:
            return schema
        beside = {key: value for key, value in schema.items() if key in _KNOWN - {"$ref", "allOf"}}
        found = self.resolved(inner, seen)
        if beside.keys() & found.keys():
            raise ValueError(f"json_schema.{min(beside.keys() & found.keys())} stands twice, beside $ref or allOf")
        return {**found, **beside}

    def alone(self, schema: Any) -> dict[str, Any]:
        """A schema that stands by itself: with the definitions that it may refer to."""
        made = dict(schema) if isinstance(schema, dict) else {}
        if '"$ref"' in json.dumps(made):
            made |= {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            for each in keywords.schemas(made):
                _check_reference(each.get("$ref", _DEFINED[0]))
        return made

    def _found(self, name: Any) -> Any:
        _check_reference(name)
        found: Any = self._root
        for part in name[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise ValueError(f"json_schema.$ref {shown(repr(name))} refers to nothing")
            found = found[part]
        return found


def _check_reference(name: Any) -> None:
    """A value's schema is taken from the one around it, together with what is defined there."""
    if not isinstance(name, str) or not name.startswith(_DEFINED):
        raise ValueError(f"json_schema.$ref {shown(repr(name))}: references go to #/$defs or #/definitions")


class _PairValues:
    def __init__(self, notation: Pairs, schemas: _Schemas, rules: Rules, style: str) -> None:
        self._notation = notation
        self._schemas = schemas
        self._rules = rules
        self._style = style

    def pair(self, key: str | None, schema: Any) -> str:
        """One argument. key: None takes any name."""
        if schema is False:
            raise ValueError(f"json_schema.properties.{key}: nothing satisfies it")
        resolved = self._schemas.resolved(schema)
        choices = _choices(resolved)
        line = ' "\\n"?'
        if choices is not None:
            typed = bool(self._notation.text_opening) or all(isinstance(choice, str) for choice in choices)
            parts = [self._choice(key, choice) if typed else self._json(key, {"const": choice}) for choice in choices]
        elif set(_types(resolved)) == {"string"}:
            parts = [self._text(key, resolved)]
        elif self._notation.text_opening and "string" in _types(resolved) and not {"anyOf", "oneOf"} & resolved.keys():
            others = [each for each in _types(resolved) if each != "string"]
            parts = [
                self._text(key, {k: v for k, v in resolved.items() if k in _TEXT}),
                self._json(key, resolved | {"type": others}),
            ]
        else:
            parts = [self._json(key, schema)]
        return f"({' | '.join(parts)}){line}" if len(parts) > 1 else f"{parts[0]}{line}"

    def _choice(self, key: str | None, choice: Any) -> str:
        if not isinstance(choice, str):
            return self._json(key, {"const": choice})
        if self._notation.closing in choice:
            raise ValueError(f"json_schema.enum {shown(repr(choice))} holds what ends it in the style {self._style}")
        if not self._notation.newline:
            return f"{self._opening(key, True)} {self._rules.literal(choice)} {self._closing()}"
        lines = f'"\\n" {quoted(choice)} "\\n"'
        edged = choice.startswith("\n") or choice.endswith("\n")
        return f"{self._opening(key, True)} ({lines}{'' if edged else f' | {quoted(choice)}'}) {self._closing()}"

    def _text(self, key: str | None, schema: Mapping[str, Any]) -> str:
        _refuse(schema, _TEXT | {"type"}, self._style)
        notation, rules = self._notation, self._rules
        text = text_of(schema, rules)
        opening = self._opening(key, True)
        if not notation.newline:
            return f"{opening} {rules.until(text, [notation.closing], without=text != ANY_TEXT)}"
        if text == ANY_TEXT:
            return f'{opening} "\\n"? {rules.until(text, [notation.closing])}'
        # A line's end next to a mark is no part of the value.
        text = f"{rules.terminal(text)} & ~/\\n(?s:.*)/ & ~/(?s:.*)\\n/"
        text = rules.holding_none(text, [notation.closing])
        return f'{opening} "\\n"? {rules.until(text, [chr(10) + notation.closing, notation.closing])}'

    def _json(self, key: str | None, schema: Any) -> str:
        line = ' "\\n"?' if self._notation.newline else ""
        made = json_schemas.written(self._schemas.alone(schema))
        return f"{self._opening(key, False)}{line} {self._rules.rule(f'%json {made}')}{line} {self._closing()}"

    def _opening(self, key: str | None, text: bool) -> str:
        opening = self._notation.text_opening if text and self._notation.text_opening else self._notation.opening
        if key is not None:
            if not key or re.search('[<>"\\n]', key):
                raise ValueError(
                    f"json_schema.properties: the style {self._style} cannot hold the key {shown(repr(key))}"
                )
            return self._rules.literal(opening.replace(KEY, key))
        before, after = opening.split(KEY)
        return f"{self._rules.literal(before)} /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/ {self._rules.literal(after)}"

    def _closing(self) -> str:
        return self._rules.literal(self._notation.closing)


class _QuotedValues:
    def __init__(self, mark: str, schemas: _Schemas, rules: Rules) -> None:
        self._mark = mark
        self._schemas = schemas
        self._rules = rules
        self._made: dict[str, str] = {}

    def value(self, schema: Any, depth: int) -> str:
        """The expression of one value. Equal schemas have one rule, which may refer to itself."""
        if schema is False:
            raise ValueError("json_schema: false accepts nothing")
        if depth > MAX_DEPTH:
            raise ValueError(f"json_schema is nested more than {MAX_DEPTH} deep")
        written = json.dumps(schema, sort_keys=True)
        if written not in self._made:
            name = self._made[written] = self._rules.later()
            self._rules.define(name, self._body(self._schemas.resolved(schema), depth))
        return self._made[written]

    def _body(self, schema: dict[str, Any], depth: int) -> str:
        choices = _choices(schema)
        if choices is not None:
            return " | ".join(self._choice(choice) for choice in choices)
        parts = schema.get("anyOf") or schema.get("oneOf")
        if parts:
            _refuse(schema, {"anyOf", "oneOf"}, "beside anyOf")
            if "oneOf" in schema and len({_types(self._schemas.resolved(part)) for part in parts}) < len(parts):
                raise ValueError("json_schema.oneOf: its parts are not told apart by type: use anyOf")
            return " | ".join(self.value(part, depth + 1) for part in parts)
        makers: dict[str, Callable[[], str]] = {
            "string": lambda: self._string(schema),
            "array": lambda: self._array(schema, depth),
            "object": lambda: self._object(schema, depth),
        }
        types = _types(schema)
        if "number" in types:
            types = tuple(each for each in types if each != "integer")
        return " | ".join(makers[each]() if each in makers else self._word(schema, each) for each in types)

    def _word(self, schema: Mapping[str, Any], kind: str) -> str:
        made = {"type": kind} | {key: schema[key] for key in _NUMBER & schema.keys() if kind in ("integer", "number")}
        return self._rules.rule(f"%json {json_schemas.written(made)}")

    def _choice(self, choice: Any) -> str:
        if isinstance(choice, str):
            if self._mark in choice:
                raise ValueError(f"json_schema.enum {shown(repr(choice))} holds what ends it in this style")
            return self._rules.literal(f"{self._mark}{choice}{self._mark}")
        if isinstance(choice, dict | list):
            raise ValueError("json_schema.enum of objects and lists has no rule in this style: use the style json")
        return quoted(json.dumps(choice))

    def _string(self, schema: Mapping[str, Any]) -> str:
        text = text_of(schema, self._rules)
        return f"{self._rules.literal(self._mark)} {self._rules.until(text, [self._mark], without=text != ANY_TEXT)}"

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        item = self.value(schema.get("items", {}), depth + 1)
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'{item} ("," {item}){{{max(least, 1) - 1},{"" if most is None else most - 1}}}'
        return f'"[" {more} "]"' if least else f'"[" ({more})? "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = _properties(schema), _required(schema)
        if not properties:
            other = f'/[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/ ":" {self.value(_others(schema), depth + 1)}'
            return f'"{{" {_map(other, schema, chr(34) + "," + chr(34))} "}}"'
        items = [(f'{self._key(key)} ":" {self.value(inner, depth + 1)}', key in required) for key, inner in properties]
        return f'"{{" {separated(items, chr(34) + "," + chr(34), self._rules)} "}}"'

    def _key(self, key: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_.$-]+", key):
            return quoted(key)
        if self._mark in key:
            raise ValueError(f"json_schema.properties: this style cannot hold the key {shown(repr(key))}")
        return self._rules.literal(f"{self._mark}{key}{self._mark}")


def text_of(schema: Mapping[str, Any], rules: Rules) -> str:
    """The terminal of the strings that a schema accepts, as they stand."""
    _check_text(schema)
    parts = []
    least, most = _count(schema, "minLength"), _count(schema, "maxLength")
    if least or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if "pattern" in schema:
        parts.append(_found_in_text(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ValueError(
                f"json_schema.format {shown(repr(schema['format']))} has no rule in this style; there are "
                f"{', '.join(_FORMATS)}"
            )
        parts.append(regex(_FORMATS[schema["format"]]))
    return " & ".join(parts) or ANY_TEXT


def _check_text(schema: Mapping[str, Any]) -> None:
    """Raises ValueError where no string satisfies all that a schema says of strings."""
    said = {key: schema[key] for key in sorted(_TEXT & schema.keys())}
    if len(said) < 2:
        return
    made = LLMatcher.grammar_from_json_schema(json_schemas.written({"type": "string", **said}))
    if "Unsatisfiable" in LLMatcher.validate_grammar(made):
        raise ValueError(f"json_schema: no string satisfies its {' and '.join(said)} together")


def _found_in_text(pattern: Any) -> str:
    """Texts in which JSON Schema's `pattern`, which is not anchored, is found."""
    if not isinstance(pattern, str):
        raise ValueError("json_schema.pattern must be a string")
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1
    if (begins or ends) and _alternates(pattern):
        raise ValueError(f"json_schema.pattern {shown(repr(pattern))}: put a group around its alternatives")
    bare = pattern[begins : len(pattern) - ends]
    inner = regex_to_lark(bare, "dw")
    return f"/{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}/"


def _alternates(pattern: str) -> bool:
    """Whether `|` stands outside of groups and classes."""
    bare = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "", pattern)
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _json(schema: Any, schemas: _Schemas, style: str) -> str:
    """A value as JSON. Python reads its strings where none has an escape that it lacks."""
    return f"%json {json_schemas.written(schemas.alone(schema), _PYTHON_ESCAPES if style == PYTHON else '')}"


def _python_name(key: str) -> str:
    if not key.isidentifier():
        raise ValueError(f"json_schema.properties: {shown(repr(key))} is no name in Python")
    return quoted(f"{key}=")


def _map(item: str, schema: Mapping[str, Any], between: str) -> str:
    """Any names, where the schema names none."""
    if schema.get("required"):
        raise ValueError("json_schema.required names what properties does not")
    if schema.get("additionalProperties") is False:
        return '""'
    return f"({item} ({between} {item})*)?" if between else f"({item})*"


def _others(schema: Mapping[str, Any]) -> Any:
    found = schema.get("additionalProperties", True)
    return {} if found in (True, False) else found


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict):
        raise ValueError("json_schema.properties must be an object")
    missing = [name for name in _required(schema) if name not in properties]
    if missing and properties:
        raise ValueError(f"json_schema.required names {shown(repr(missing[0]))}, which properties does not")
    wanted = _required(schema)
    return [(key, inner) for key, inner in properties.items() if inner is not False or key in wanted]


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required") or []
    if not isinstance(required, list) or any(not isinstance(name, str) for name in required):
        raise ValueError("json_schema.required must be a list of strings")
    return required


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a value may have."""
    given = schema.get("type")
    types = tuple(given) if isinstance(given, list) else _TYPES if given is None else (given,)
    if not types or any(each not in _TYPES for each in types):
        raise ValueError(f"json_schema.type {shown(repr(given))} is unknown; types are {', '.join(_TYPES)}")
    return types


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" not in schema and "enum" not in schema:
        return None
    choices = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(choices, list) or not choices:
        raise ValueError("json_schema.enum must be a list that holds something")
    _refuse(schema, {"const", "enum", "type"}, "beside enum")
    if "type" in schema:
        choices = [each for each in choices if _type_of(each) & set(_types(schema))]
        if not choices:
            raise ValueError("json_schema.enum holds nothing of its type")
    return choices


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LENGTH:
        raise ValueError(f"json_schema.{keyword} must be a number from 0 to {MAX_LENGTH} in this style")
    return value


def _refuse(schema: Mapping[str, Any], known: set[str] | frozenset[str], where: str) -> None:
    for keyword in sorted((_KNOWN - known) & schema.keys()):
        raise ValueError(f"json_schema.{keyword} has no rule there ({where}): use the style json")
