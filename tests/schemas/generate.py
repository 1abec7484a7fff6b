"""Random JSON schemas, and documents that a schema accepts."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema

NAMES = ("a", "name", "é", "x y", "", '"', "日本", "back\\slash", "🙂", "a.b", "tab\t", "$id", "n" * 40)
TEXTS = ("", "a", "plain text", 'quo"te', "new\nline", "日本語", "🙂🙃", "é" * 9, "\\", "/", "\u0001", "<b>&", "null")
# Patterns, each with texts in which it is found.
PATTERNS = {
    "^[a-c]{2,4}$": ("ab", "cccc", "abc"),
    "^(ab|é)+z$": ("abz", "ééabz"),
    "\\d{3}-\\d{2}": ("123-45", "x000-11y"),
    "^\\S+@\\S+$": ("a@b", "é@日"),
    '^[^\\s"]{1,5}$': ("abc", "日"),
    "^#([0-9A-Fa-f]{6})$": ("#00ffAA",),
    "[\\u4e00-\\u9fff]": ("日本", "a日"),
    "^$|^x": ("", "xyz"),
    "\\.json$": ("a.json",),
}
FORMATS = {
    "date": ("2024-02-29", "1999-12-31", "2023-01-01"),
    "time": ("23:59:59Z", "00:00:00.125+02:00"),
    "date-time": ("2024-02-29T12:00:00Z", "1970-01-01T00:00:00.5-08:00"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "ipv4": ("0.0.0.0", "255.255.255.255"),
    "ipv6": ("::1", "2001:db8::8:800:200c:417a"),
    "email": ("a@example.com", "first.last+tag@b-c.org"),
    "hostname": ("example.com", "a-b.c"),
    "uri": ("https://example.com/a?b=c#d", "urn:isbn:0451450523"),
    "duration": ("P1D", "PT1H30M"),
}
BOUNDS = (0, 1, -1, 9, 10, 99, 100, -128, 127, 255, 65535, -(2**31), 2**31 - 1, 2**53, -(2**53), 10**15)
DEEPEST = 4


def random_schema(rng: Random) -> dict[str, Any]:
    """A schema of any kind; some have what grammars cannot hold."""
    schema = _schema(rng, DEEPEST)
    if rng.random() < 0.15:
        schema = {"$defs": {"part": _schema(rng, 2)}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3}
    if rng.random() < 0.05:
        more = {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "value": _schema(rng, 1)}
        schema = {"type": "object", "properties": more, "required": ["value"], "additionalProperties": False}
    if rng.random() < 0.05:
        schema = {**schema, **rng.choice(_WILD)(rng)}
    return schema


def _schema(rng: Random, depth: int) -> dict[str, Any]:
    makers = _LEAVES if depth <= 0 else (*_LEAVES, *_DEEPER, *_DEEPER)
    return rng.choice(makers)(rng, depth)


def _integer(rng: Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "integer"}
    low, high = sorted((rng.choice(BOUNDS), rng.choice(BOUNDS)))
    if rng.random() < 0.6:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = low - 1
    if rng.random() < 0.6:
        made[rng.choice(("maximum", "exclusiveMaximum"))] = high + 1
    if rng.random() < 0.2:
        made["multipleOf"] = rng.choice((2, 3, 5, 7, 10, 64, 100))
    return made


def _number(rng: Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "number"}
    low = rng.choice((*BOUNDS[:10], 0.5, -0.25, 1e-3, 99.99))
    if rng.random() < 0.6:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.6:
        made[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((0.5, 1, 10, 1e6))
    if rng.random() < 0.1:
        made["multipleOf"] = rng.choice((0.5, 0.25, 2, 10))
    return made


def _string(rng: Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    kind = rng.random()
    if kind < 0.3:
        made["pattern"] = rng.choice(tuple(PATTERNS))
    elif kind < 0.5:
        made["format"] = rng.choice(tuple(FORMATS))
    elif kind < 0.8:
        made["minLength"] = rng.randint(0, 4)
        made["maxLength"] = made["minLength"] + rng.randint(0, 12)
    return made


def _choice(rng: Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [*TEXTS, *BOUNDS, True, False, None, 0.5, -1.25, 12345.75, [1, "a"], {"k": "日", "l": [None]}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _array(rng: Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.9:
        made["items"] = _schema(rng, depth - 2)
    if rng.random() < 0.2:
        made["prefixItems"] = [_schema(rng, depth - 2) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.6:
        made["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.8:
        made["maxItems"] = made.get("minItems", 0) + rng.randint(0, 3)
    return made


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}}
    made["required"] = [name for name in names if rng.random() < 0.6]
    kind = rng.random()
    if kind < 0.7:
        made["additionalProperties"] = False
    elif kind < 0.85:
        made["additionalProperties"] = _schema(rng, 0)
    if rng.random() < 0.08:
        made["patternProperties"] = {"^x_": _schema(rng, 0)}
    if rng.random() < 0.08:
        made[rng.choice(("minProperties", "maxProperties"))] = rng.randint(0, 3)
    return made


def _any_of(rng: Random, depth: int) -> dict[str, Any]:
    return {rng.choice(("anyOf", "anyOf", "oneOf")): [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: Random, depth: int) -> dict[str, Any]:
    parts = [{"type": "object", "properties": {name: _schema(rng, depth - 2)}} for name in rng.sample(NAMES, 2)]
    return {"allOf": [*parts, {"required": list(parts[0]["properties"])}]}


def _types(rng: Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "array", "object"]
    return {"type": rng.sample(kinds, rng.randint(1, 3)), "maxLength": 9, "maxItems": 2, "minimum": 0}


def _no_more(rng: Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null"))}


Maker = Callable[[Random, int], dict[str, Any]]
_LEAVES: tuple[Maker, ...] = (_integer, _number, _string, _string, _choice, _no_more)
_DEEPER: tuple[Maker, ...] = (_object, _object, _array, _any_of, _all_of, _types)
_WILD: tuple[Callable[[Random], dict[str, Any]], ...] = (
    lambda rng: {"not": _schema(rng, 0)},
    lambda rng: {"if": _schema(rng, 0), "then": _schema(rng, 0)},
    lambda rng: {"uniqueItems": True},
    lambda rng: {"contains": _schema(rng, 0)},
    lambda rng: {"propertyNames": {"pattern": "^[a-z]+$"}},
    lambda rng: {"dependentRequired": {"a": ["name"]}},
    lambda rng: {"unevaluatedProperties": False},
    lambda rng: {"type": "string", "format": "idn-email"},
    lambda rng: {"type": "string", "pattern": "^(?=a)b"},
    lambda rng: {"$ref": "https://example.com/other.json"},
    lambda rng: {"description": "says nothing", "examples": [1], "$comment": "x", "deprecated": True},
)


def document(schema: Any, rng: Random, root: Any, depth: int = 0) -> Any:
    """A document that `schema` may accept: its keywords are followed one at a time, so the caller asks a validator."""
    if not isinstance(schema, dict):
        return rng.choice((1, "a", None))
    if "$ref" in schema:
        found: Any = root
        for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if part else found
        return document(found, rng, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            parts = schema[keyword] if depth < 8 else schema[keyword][-1:]
            beside = {key: value for key, value in schema.items() if key != keyword}
            return document({**rng.choice(parts), **beside}, rng, root, depth + 1)
    if schema.get("allOf"):
        return _merged(schema, rng, root, depth)
    kinds = schema.get("type") or next((kind for kind, words in _WORDS.items() if words & schema.keys()), "string")
    return _DOCUMENTS[rng.choice(kinds) if isinstance(kinds, list) else kinds](schema, rng, root, depth)


def _merged(schema: dict[str, Any], rng: Random, root: Any, depth: int) -> Any:
    whole: dict[str, Any] = {k: v for k, v in schema.items() if k != "allOf"}
    for part in schema["allOf"]:
        whole["properties"] = whole.get("properties", {}) | part.get("properties", {})
        whole["required"] = [*whole.get("required", ()), *part.get("required", ())]
    return document({**whole, "type": "object"}, rng, root, depth + 1)


def _a_number(schema: dict[str, Any], rng: Random, step: float) -> float:
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf) + step)
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf) - step)
    low = low if low > -math.inf else (high - 50 if high < math.inf else -50)
    high = high if high < math.inf else low + 100
    value = rng.choice((low, high, low + (high - low) / 2))
    value = schema["multipleOf"] * math.ceil(value / schema["multipleOf"]) if "multipleOf" in schema else value
    # Grammars have one way to write a multiple. Past 2^53 bounds are held to the next float within.
    value = int(value) if value == math.floor(value) else value
    return max(-(2**53), min(value, 2**53))


def _a_string(schema: dict[str, Any], rng: Random, root: Any, depth: int) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
    fitting = PATTERNS.get(schema.get("pattern", ""), ()) or FORMATS.get(schema.get("format", ""), ()) or TEXTS
    texts = [text for text in fitting if least <= len(text) <= most]
    return rng.choice(texts) if texts else ("é" * least if least <= 64 else "")


def _an_array(schema: dict[str, Any], rng: Random, root: Any, depth: int) -> list[Any]:
    least = schema.get("minItems", 0)
    size = least if depth > 8 else min(schema.get("maxItems", least + 2), least + rng.randint(0, 2))
    first = schema.get("prefixItems", ())
    parts = [first[i] if i < len(first) else schema.get("items", {}) for i in range(size)]
    return [document(part, rng, root, depth + 1) for part in parts]


def _an_object(schema: dict[str, Any], rng: Random, root: Any, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    share = 0.5 if depth < 3 else 0.1 if depth < 6 else 0.0
    chosen = [name for name in schema.get("properties", {}) if name in required or rng.random() < share]
    made = {name: document(schema["properties"][name], rng, root, depth + 1) for name in chosen}
    others = schema.get("additionalProperties", {})
    made |= {name: document(others, rng, root, depth + 1) for name in required if name not in made}
    if others is not False and rng.random() < share and len(made) < schema.get("maxProperties", 99):
        made["another"] = document(others, rng, root, depth + 1)
    return made


_WORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_DOCUMENTS: dict[str, Callable[[dict[str, Any], Random, Any, int], Any]] = {
    "boolean": lambda schema, rng, root, depth: rng.random() < 0.5,
    "null": lambda schema, rng, root, depth: None,
    "integer": lambda schema, rng, root, depth: int(_a_number(schema, rng, 1)),
    "number": lambda schema, rng, root, depth: _a_number(schema, rng, 0.125),
    "string": _a_string,
    "array": _an_array,
    "object": _an_object,
}


def validator(schema: Any) -> Any:
    """What judges documents, formats included."""
    of = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return of(schema, format_checker=of.FORMAT_CHECKER)
