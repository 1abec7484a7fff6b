"""A JSON schema as grammars can hold it: what they would get wrong is refused by its keyword, or written as they
read it.

Grammars hold bounds of numbers as 64-bit floats and those of integers as 64-bit integers as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from itertools import groupby
from typing import Any

from engine.structured import combined_patterns, decimals, endless, keywords, other_names, string_formats
from engine.structured.combined_patterns import MAX_STEP
from engine.types import shown

MAX_DEPTH = 64
MAX_OPTIONAL = 4096  # properties of an object: compiling takes the square of them, three seconds for these
# Of those next to each other, where none is required, one comes behind them, and one comes before them: behind one
# token four items of the parser for each may be open, three and one, of limits.MAX_WAYS.
MAX_ALONE, MAX_BEFORE, MAX_BEHIND = 248, 333, 995
MAX_VALUES = 100_000  # of a schema: objects, arrays, strings and numbers together
# Up to this, 64-bit floats hold integers, which grammars of JSON compare as such.
EXACT = 1 << 53
MIN_INTEGER, MAX_INTEGER = -(1 << 63) + 1024, (1 << 63) - 1  # of integers; no grammar is made for a bound below
MAX_NUMBER = (1 << 63) - 2048  # of numbers, likewise

# Keywords whose values are no schemas, and those whose values are schemas by names of the client's.
_DATA = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Values that ask for nothing, and keywords that do where none of those named beside them stands.
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
_NEEDS = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
# llguidance's options that a schema may bring along: none that lets it pass over a keyword.
_OPTIONS = "x-guidance"
_ANYTHING: tuple[Any, ...] = (None, True, {})
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties")
_BESIDE = ("patternProperties", "minProperties", "maxProperties")  # beside which grammars take no further pattern
_TAKEN = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")


def written(schema: dict[str, Any], escapes: str = "") -> str:
    """The text of `held(schema)` with how its strings may be escaped. escapes: the letters that may, where a notation
    knows less than JSON."""
    made = held(schema)
    given = made.pop(_OPTIONS, {})
    unknown = sorted(given.keys() - set(_TAKEN)) if isinstance(given, dict) else [""]
    if unknown:
        name = f"{_OPTIONS}.{unknown[0]}".rstrip(".")
        raise ValueError(f"{shown(name)} is not taken: it may be an object with {', '.join(_TAKEN)}")
    parts = _schemas(made)
    meeting = any(map(_meets, _schemas(schema)))
    together = any(part.get(key) for part in parts for key in _BESIDE)
    for part in parts:
        if not (together if meeting else any(part.get(key) for key in _BESIDE)):
            _close(part, meeting)
        _order(part)
    options = {"json_allowed_escapes": escapes} if escapes else {"json_allow_general_unicode_escapes": True}
    return json.dumps({**made, _OPTIONS: {**given, **options}})


def _meets(schema: dict[str, Any]) -> bool:
    """Whether what it says of an object is put together with another schema's, or is referred to by its place."""
    if "/additionalProperties" in str(schema.get("$ref")):
        return True
    ways = any(key in schema for key in ("$ref", "anyOf", "oneOf"))
    return "allOf" in schema or (ways and any(key in schema for key in _OF_OBJECTS))


def _close(schema: dict[str, Any], meeting: bool) -> None:
    """Other names than those listed are of a pattern then, in which grammars have no escape that one could write a
    listed name with. One with a schema of its own says which names these are; of two such no grammar is made."""
    listed, required = schema.get("properties"), schema.get("required")
    names = [*(listed if isinstance(listed, dict) else ()), *(required if isinstance(required, list) else ())]
    others = schema.get("additionalProperties")
    if not names or others is False or not all(isinstance(name, str) for name in names):
        return
    anything = others in _ANYTHING
    pattern: str | None = None
    if not meeting and (not anything or any(map(other_names.has_control, names))):
        pattern = other_names.pattern(names)
    if pattern is None and not anything:
        return
    held_to = True if anything else others
    if pattern is not None:
        schema["properties"] = dict.fromkeys(names, held_to) | (listed or {})
    schema |= {"patternProperties": {pattern or "": held_to}, "additionalProperties": False}


def _order(schema: dict[str, Any]) -> None:
    """What other names are held to is read in two, where `allOf` and the like stand between its keywords. Names keep
    their order."""
    pair = {key: schema[key] for key in ("patternProperties", "additionalProperties") if key in schema}
    if len(pair) < 2:
        return
    behind = "properties" if "properties" in schema else next(key for key in schema if key in pair)
    made: dict[str, Any] = {}
    for key, value in schema.items():
        made |= ({} if key in pair else {key: value}) | (pair if key == behind else {})
    schema.clear()
    schema |= made


def _schemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Every schema within."""
    return [
        value for _, key, value, data in _values(schema) if isinstance(value, dict) and not data and key not in _NAMED
    ]


def held(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with bounds that grammars hold as it says: beyond 2^53 the next one within. Raises ValueError."""
    for count, (depth, key, value, data) in enumerate(_values(schema)):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if count >= MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        if data in ("const", "enum") and isinstance(value, int) and abs(value) > EXACT:
            raise ValueError(f"{data} {shown(str(value))}: integers beyond 2^53 cannot be held to: make it a string")
        if data in ("const", "enum"):
            decimals.check(value, data)
        if data:
            continue
        if key == "multipleOf" and _number(value):
            _check_step(value)
        if isinstance(value, dict):
            _check_properties(value)
    keywords.check(schema)
    endless.check(schema)
    combined_patterns.check(schema)
    made = _bounded(schema)
    assert isinstance(made, dict)
    return made


def _check_step(value: Any) -> None:
    if combined_patterns.digits(Decimal(str(value))) > MAX_STEP:
        raise ValueError(f"multipleOf {shown(str(value))}: its digits may be {MAX_STEP} at most")


def _check_properties(schema: dict[str, Any]) -> None:
    """Raises ValueError for too many names that may be missing, and where names that are not listed might come twice
    and count twice."""
    least, required, listed = (schema.get(key) for key in ("minProperties", "required", "properties"))
    if isinstance(listed, dict) and len(listed) > MAX_ALONE:
        _check_optional(listed, required if isinstance(required, list) else [])
    if not isinstance(least, int | float) or not isinstance(required, list | None):
        return
    others = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    if others and least > len(required or ()) + 1:
        raise ValueError(
            f"minProperties {least}: at most one more than `required` names, where additionalProperties may be others"
        )


def _check_optional(listed: dict[str, Any], required: list[Any]) -> None:
    """Raises ValueError for too many names that may be missing, in all or next to each other."""
    needed = {name for name in required if isinstance(name, str)}
    missing = [name not in needed for name, held_to in listed.items() if held_to is not False or name in needed]
    if (count := sum(missing)) > MAX_OPTIONAL:
        raise ValueError(f"properties: {count} may be missing, at most {MAX_OPTIONAL} may: name others in `required`")
    for place, (may, run) in enumerate(groupby(missing)):
        limit = MAX_ALONE if not needed else MAX_BEFORE if place == 0 else MAX_BEHIND
        if may and (count := len(list(run))) > limit:
            raise ValueError(
                f"properties: {count} next to each other may be missing, at most {limit} may there: name the first of "
                "them in `required`, or others between them"
            )


def _bounded(value: Any, keyword: str = "") -> Any:
    """keyword: that the value belongs to."""
    if isinstance(value, list):
        return [_bounded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if keyword in _NAMED:
        named = string_formats.without_nul if keyword == "patternProperties" else str
        return {named(name): _bounded(each) for name, each in value.items()}
    if "oneOf" in value and "type" in value:
        value = {"type": value["type"], **value}  # parts are told apart by what is known when they are read
    made = {key: each if key in _DATA else _bounded(each, key) for key, each in value.items() if not _idle(value, key)}
    for key in _COUNTS:
        if isinstance(made.get(key), float) and made[key].is_integer():
            made[key] = int(made[key])
    if isinstance(made.get("pattern"), str):
        made["pattern"] = string_formats.without_nul(made["pattern"])
    if isinstance(made.get("format"), str) and made["format"] in string_formats.EXACT:
        pattern = f"^{string_formats.EXACT[made.pop('format')]}$"
        more = {"allOf": [*made.get("allOf", ()), {"pattern": pattern}]} if "pattern" in made else {"pattern": pattern}
        made |= more
    if _number(made.get("multipleOf")):
        made = _steps(made)
    if not any(_number(made.get(key)) for key in (*_LOW, *_HIGH)):
        return made
    if made.get("type") == "integer":
        return _integer_bounds(made)
    _check_exclusive(made)
    for key in (*_LOW, *_HIGH):
        bound: Any = made.get(key)
        if isinstance(bound, int) and abs(bound) > EXACT:
            made[key] = bound = _within(bound, up=key in _LOW)
        if not _number(bound):
            continue
        if (bound > MAX_NUMBER) if key in _LOW else (bound < -MAX_NUMBER):
            raise ValueError(f"{key} {shown(str(bound))}: numbers beyond 2^63 cannot be compared")
        bound = decimals.within(bound, key in _LOW) if isinstance(bound, float) else bound
        made[key] = max(bound, -MAX_NUMBER) if key in _LOW else min(bound, MAX_NUMBER)
    return made


def _steps(schema: dict[str, Any]) -> dict[str, Any]:
    """The same with the steps that its `multipleOf` is read as."""
    steps = decimals.steps(schema["multipleOf"])
    given = schema.get("type", ())  # without a type the alternatives take seconds to compile
    types = given if isinstance(given, list | tuple) else [given]
    if len(steps) == 1 or "number" not in types:
        return {**schema, "multipleOf": steps[0]}
    ways: list[dict[str, Any]] = [{"type": "number", "multipleOf": step} for step in steps]
    if others := [each for each in types if each not in ("number", "integer")]:
        ways.append({"type": others})
    made = {key: value for key, value in schema.items() if key != "multipleOf"}
    return {**made, "allOf": [*schema.get("allOf", ()), {"anyOf": ways}]}


def _idle(schema: dict[str, Any], key: str) -> bool:
    """Whether a keyword asks for nothing."""
    value = schema[key]
    if any(type(value) is type(nothing) and value == nothing for nothing in _IDLE.get(key, ())):
        return True
    return key in _NEEDS and not any(other in schema for other in _NEEDS[key])


def _integer_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Exclusive bounds as inclusive ones, all of them integers that grammars hold."""
    lows = [math.ceil(schema["minimum"])] if _number(schema.get("minimum")) else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if _number(schema.get("exclusiveMinimum")) else []
    highs = [math.floor(schema["maximum"])] if _number(schema.get("maximum")) else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if _number(schema.get("exclusiveMaximum")) else []
    made = {key: value for key, value in schema.items() if key not in (*_LOW, *_HIGH) or not _number(value)}
    if lows:
        made["minimum"] = max(_within(max(lows), up=True), MIN_INTEGER)
    if highs:
        made["maximum"] = min(_within(min(highs), up=False), MAX_INTEGER)
    return made


def _within(bound: int, up: bool) -> int:
    """The nearest integer that is a 64-bit float, not below the bound, or not above it."""
    if abs(bound) <= EXACT or bound == MAX_INTEGER:
        return bound
    try:
        near = float(bound)
    except OverflowError:
        near = math.copysign(1e300, bound)
    if int(near) < bound and up:
        near = math.nextafter(near, math.inf)
    elif int(near) > bound and not up:
        near = math.nextafter(near, -math.inf)
    return int(near)


def _check_exclusive(schema: dict[str, Any]) -> None:
    """Between an integer that is excluded and a bound less than one further from 0, grammars let that integer
    through."""
    for one, others, sign in ((_LOW[1], _HIGH, 1), (_HIGH[1], _LOW, -1)):
        bound = schema.get(one)
        if bound is None or not _number(bound) or bound != math.floor(bound) or sign * bound < 0:
            continue
        for key in others:
            other = schema.get(key)
            if _number(other) and 0 < sign * (other - bound) < 1:
                raise ValueError(
                    f"{one} {bound} with {key} {other}: they have to be 1 apart, or make it {one[9:].lower()}"
                )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _values(schema: Any) -> Iterator[tuple[int, str, Any, str]]:
    """(depth, keyword, value, data) of everything within. data: the keyword, if any, within whose value this is, which
    is no schema. A name of the client's is no keyword."""
    left: list[tuple[int, str, Any, str]] = [(1, "", schema, "")]
    while left:
        depth, key, value, data = left.pop()
        yield depth, key, value, data
        if isinstance(value, dict):
            for name, inner in value.items():
                keyword = "" if data or key in _NAMED else name
                left.append((depth + 1, keyword, inner, data or (keyword if keyword in _DATA else "")))
        elif isinstance(value, list):
            left.extend((depth + 1, "", inner, data) for inner in value)
