"""Names in a JSON schema that are no keywords. They are annotations, of which schemas hold many; one that is nearly a
keyword is a mistake, by which a schema would ask for less than was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.types import shown

_SHORT = ("type", "enum", "const", "items", "format", "allOf", "anyOf", "oneOf")
_LONG = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "properties",
    "required",
    "patternProperties",
    "propertyNames",
    "additionalProperties",
    "unevaluatedProperties",
    "minProperties",
    "maxProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
)
_ALL = frozenset((*_SHORT, *_LONG))
# Keywords whose value is a schema or a list of them, and those whose value has schemas by name.
_SCHEMAS = (
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
)
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_DEFINED = ("$defs", "definitions")


def check(schema: Any) -> None:
    """Raises ValueError with a name that is a keyword but for its case, `_`, `-` or an `s` at its end, or, where it is
    long, for one letter."""
    for each in schemas(schema):
        for name in each.keys() - _ALL:
            if meant := _meant(name):
                raise ValueError(
                    f"{shown(name)} is no keyword of JSON schemas: write {meant}, or give an annotation another name"
                )


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema within. What an annotation holds is none."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left += within(each)


def within(schema: dict[str, Any], definitions: bool = True) -> Iterator[Any]:
    """The schemas next within one. definitions: also those that it only defines."""
    for key in _SCHEMAS:
        value = schema.get(key)
        yield from value if isinstance(value, list) else (value,)
    for key in (*_NAMED, *(_DEFINED if definitions else ())):
        if isinstance(named := schema.get(key), dict):
            yield from named.values()


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").casefold()


def _shorter(name: str) -> set[str]:
    """A name, and what it is without one of its letters: two that share one are about a letter apart."""
    return {name, *(name[:i] + name[i + 1 :] for i in range(len(name)))}


_EXACT = {_plain(name): name for name in _ALL} | {_plain(name).removesuffix("s") + "s": name for name in _SHORT}
_EXACT |= {"item": "items"}
_NEAR = {near: name for name in _LONG for near in _shorter(_plain(name))}
_LONGEST = max(map(len, _ALL)) + 4


def _meant(name: str) -> str | None:
    if len(name) > _LONGEST or name.startswith(("$", "x-")):
        return None
    plain = _plain(name)
    if plain in _EXACT:
        return _EXACT[plain]
    return next((_NEAR[near] for near in sorted(_shorter(plain)) if near in _NEAR), None)
