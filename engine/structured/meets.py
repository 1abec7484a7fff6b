"""Expressions that one text has to match all of: few, for what these take grows with the product of their states.

Of twelve expressions of 30 characters the first bits take gigabytes and minutes, which no limit of llguidance's ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MAX_MET = 4
_MAX_LOOKED_AT = 20_000
_MET = ("pattern", "format")


def check(schema: dict[str, Any]) -> None:
    """Raises ValueError where a string would have to match too many patterns and formats, by allOf and $ref."""
    _Meets(schema).check(schema)


class _Meets:
    """Parts that hold of the same value, put together as llguidance does it, but for alternatives: the worst of
    them counts, and of properties all."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._looked_at = 0
        self._seen: set[frozenset[int]] = set()

    def check(self, schema: Any) -> None:
        waiting: list[Any] = [schema]
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                if "allOf" in each or "$ref" in each:
                    self._together([each])
                waiting += each.values()
            elif isinstance(each, list):
                waiting += each

    def _together(self, parts: Sequence[dict[str, Any]]) -> None:
        """Of parts that one value has to satisfy, and of what they say of the same property or item of it."""
        these = frozenset(map(id, parts))
        if these in self._seen:
            return
        self._seen.add(these)
        met = [atom for part in parts for atom in self._atoms(part, frozenset())]
        if (count := _count(met)) > MAX_MET:
            raise ValueError(
                f"{count} patterns and formats would have to hold of one string, by allOf or $ref; at most {MAX_MET} "
                "are allowed"
            )
        within: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for atom in met:
            for key, name, inner in _within(atom):
                within.setdefault((key, name), []).append(inner)
        for each in within.values():
            if len(each) > 1:
                self._together(each)

    def _atoms(self, part: dict[str, Any], above: frozenset[str]) -> Iterator[dict[str, Any]]:
        self._looked_at += 1
        if self._looked_at > _MAX_LOOKED_AT:
            raise ValueError("allOf and $ref combine too many parts: make it simpler")
        yield part
        for each in _dicts(part.get("allOf")):
            yield from self._atoms(each, above)
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in above and (found := self._found(reference)) is not None:
            yield from self._atoms(found, above | {reference})
        for key in ("anyOf", "oneOf"):
            choices = sorted((list(self._atoms(each, above)) for each in _dicts(part.get(key))), key=_count)
            yield from choices[-1] if choices else ()
            for choice in choices[:-1]:
                yield from ({key: value for key, value in atom.items() if key not in _MET} for atom in choice)

    def _found(self, reference: str) -> dict[str, Any] | None:
        """What a reference within the schema stands for."""
        if not reference.startswith("#"):
            return None
        value: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else None


def _count(atoms: Sequence[dict[str, Any]]) -> int:
    return sum(any(key in atom for key in _MET) for atom in atoms)


def _within(atom: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for key in ("properties", "patternProperties"):
        named = atom.get(key)
        for name, inner in named.items() if isinstance(named, dict) else ():
            if isinstance(inner, dict):
                yield "properties", name, inner
    for key in ("additionalProperties", "items"):
        if isinstance(inner := atom.get(key), dict):
            yield key, "", inner
    for inner in _dicts(atom.get("prefixItems")):
        yield "items", "", inner


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
