"""A JSON schema as grammars can hold it: what they would get wrong is refused by its keyword, or written as they
read it.

Grammars hold bounds of numbers as 64-bit floats and those of integers as 64-bit integers as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from engine.structured import meets
from engine.types import shown

MAX_DEPTH = 64
MAX_VALUES = 100_000  # of a schema: objects, arrays, strings and numbers together
# A step of 99,999 takes 1.3 s to compile, one of 999,983 16 s.
MAX_STEP = 10_000
# Up to this, 64-bit floats hold integers, which grammars of JSON compare as such.
EXACT = 1 << 53
MIN_INTEGER, MAX_INTEGER = -(1 << 63) + 1024, (1 << 63) - 1  # of integers; no grammar is made for a bound below

# Keywords whose values are no schemas, and those whose values are schemas by names of the client's.
_DATA = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def held(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with bounds that grammars hold as it says: beyond 2^53 the next one within. Raises ValueError."""
    for count, (depth, key, value, data) in enumerate(_values(schema)):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if count >= MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        if data in ("const", "enum") and isinstance(value, int) and abs(value) > EXACT:
            raise ValueError(f"{data} {shown(str(value))}: integers beyond 2^53 cannot be held to: make it a string")
        if data:
            continue
        if key == "multipleOf" and _number(value):
            _check_step(value)
        if isinstance(value, dict):
            _check_properties(value)
    meets.check(schema)
    made = _bounded(schema)
    assert isinstance(made, dict)
    return made


def _check_step(value: Any) -> None:
    _, digits, exponent = Decimal(str(value)).as_tuple()
    step = int("".join(map(str, digits))) * 10 ** min(max(int(exponent), 0), 20)
    if step > MAX_STEP:
        raise ValueError(f"multipleOf {shown(str(value))}: its digits may be {MAX_STEP} at most")


def _check_properties(schema: dict[str, Any]) -> None:
    """Names that the schema does not list may come twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, int) or not isinstance(required, list | None):
        return
    others = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    if others and least > len(required or ()) + 1:
        raise ValueError(
            f"minProperties {least}: at most one more than `required` names, where additionalProperties may be others"
        )


def _bounded(value: Any, keyword: str = "") -> Any:
    """keyword: that the value belongs to."""
    if isinstance(value, list):
        return [_bounded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if keyword in _NAMED:
        return {name: _bounded(each) for name, each in value.items()}
    made = {key: each if key in _DATA else _bounded(each, key) for key, each in value.items()}
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if not any(_number(made.get(key)) for key in (*_LOW, *_HIGH)):
        return made
    if made.get("type") == "integer":
        return _integer_bounds(made)
    _check_exclusive(made)
    for key in (*_LOW, *_HIGH):
        if isinstance(made.get(key), int) and abs(made[key]) > EXACT:
            made[key] = _within(made[key], up=key in _LOW)
    return made


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
