"""Expressions that one text has to match all of: few, for what these take grows with the product of their states.

Of twelve expressions of 30 characters the first bits take gigabytes and minutes, which no limit of llguidance's ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from engine.structured.references import References, objects

MAX_MET = 4
# A step of 99,999 takes 1.3 s to compile, one of 999,983 16 s, and one of 10^8 never ended.
MAX_STEP = 10_000
_MAX_STEPS, _MAX_PLACES = 256, 9
_TOO_MUCH = 1 << 32  # to be computed with
_MAX_LOOKED_AT = 20_000
_MET = ("pattern", "format")
_TOGETHER = ("allOf", "$ref", "anyOf", "oneOf")


def check(schema: dict[str, Any]) -> None:
    """Raises ValueError where a string would have to match too many patterns and formats, or a number be a multiple of
    too large a step, by allOf, anyOf, oneOf and $ref."""
    _CombinedPatterns(schema).check(schema)


class _CombinedPatterns:
    """Parts that hold of the same value, put together as llguidance does it, but for alternatives: the worst of
    them counts, and of properties all."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._looked_at = 0
        self._seen: set[frozenset[int]] = set()
        self._covered: set[int] = set()  # parts that were looked at with all that holds beside them
        self._references = References(root)
        self._steps = any("multipleOf" in each for each in objects(root))

    def check(self, schema: Any) -> None:
        for each in objects(schema):
            if id(each) not in self._covered and any(key in each for key in _TOGETHER):
                self._together([each])

    def _together(self, parts: Sequence[dict[str, Any]]) -> None:
        """Of parts that one value has to satisfy, and of what they say of the same property or item of it."""
        these = frozenset(map(id, parts))
        if these in self._seen:
            return
        self._seen.add(these)
        met = [atom for part in parts for atom in self._atoms(part, frozenset())]
        self._covered.update(map(id, met))
        if (count := _count(met)) > MAX_MET:
            raise ValueError(
                f"{count} patterns and formats would have to hold of one string, by {_WAYS}; at most {MAX_MET} are "
                "allowed"
            )
        if self._steps:
            _combined([self._steps_of(part, frozenset()) for part in parts])
        within: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for atom in met:
            for key, name, inner in _within(atom):
                within.setdefault((key, name), []).append(inner)
        for each in within.values():
            if len(each) > 1:
                self._together(each)

    def _atoms(self, part: dict[str, Any], above: frozenset[int]) -> Iterator[dict[str, Any]]:
        self._looked_at += 1
        if self._looked_at > _MAX_LOOKED_AT:
            raise ValueError("allOf and $ref combine too many parts: make it simpler")
        yield part
        for each in _dicts(part.get("allOf")):
            yield from self._atoms(each, above)
        for found in self._references.of(part):
            if id(found) not in above:
                yield from self._atoms(found, above | {id(found)})
        for key in ("anyOf", "oneOf"):
            choices = sorted((list(self._atoms(each, above)) for each in _dicts(part.get(key))), key=_count)
            yield from choices[-1] if choices else ()
            for choice in choices[:-1]:
                yield from ({key: value for key, value in atom.items() if key not in _MET} for atom in choice)

    def _steps_of(self, part: dict[str, Any], above: frozenset[int]) -> set[Decimal]:
        """The steps that a number may have to keep to, of which the alternatives of a part say one each; 0 for any."""
        self._looked_at += 1
        made = [{_step(part)}, *(self._steps_of(each, above) for each in _dicts(part.get("allOf")))]
        for found in self._references.of(part):
            if id(found) not in above:
                made.append(self._steps_of(found, above | {id(found)}))
        for key in ("anyOf", "oneOf"):
            if choices := _dicts(part.get(key)):
                made.append(set().union(*(self._steps_of(each, above) for each in choices)))
        return _combined(made)


_WAYS = "allOf, anyOf, oneOf or $ref"


def _count(atoms: Sequence[dict[str, Any]]) -> int:
    return sum(any(key in atom for key in _MET) for atom in atoms)


def _step(part: dict[str, Any]) -> Decimal:
    step = part.get("multipleOf")
    return abs(Decimal(str(step))) if isinstance(step, int | float) and not isinstance(step, bool) else Decimal()


def _combined(steps: Sequence[set[Decimal]]) -> set[Decimal]:
    """Those of which one of each set holds of the same number."""
    made = {Decimal()}
    for each in steps:
        made = {_multiple(one, other) for one in made for other in each}
        if len(made) > _MAX_STEPS:
            raise ValueError(f"multipleOf: alternatives combine to more than {_MAX_STEPS} steps: make it simpler")
    return made


def _multiple(one: Decimal, other: Decimal) -> Decimal:
    """The least common multiple. Raises ValueError where llguidance cannot compute it, or it has too many states."""
    if not one or not other:
        return one or other
    places = max(0, -min(int(each.normalize().as_tuple().exponent) for each in (one, other)))
    scaled = [int(each.scaleb(places)) for each in (one, other)] if places <= _MAX_PLACES else [_TOO_MUCH] * 2
    made = Decimal(math.lcm(*scaled)).scaleb(-places).normalize() if max(scaled) < _TOO_MUCH else Decimal(_TOO_MUCH)
    if math.prod(scaled) >= _TOO_MUCH or digits(made) > MAX_STEP:
        raise ValueError(
            f"multipleOf {one} and {other} would have to hold of one number, by {_WAYS}: the digits of their least "
            f"common multiple may be {MAX_STEP} at most"
        )
    return made


def digits(step: Decimal) -> int:
    """A number without its point: what a grammar counts by."""
    _, made, exponent = step.as_tuple()
    return int("".join(map(str, made))) * 10 ** min(max(int(exponent), 0), 20)


def _within(atom: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for key in ("properties", "patternProperties"):
        named = atom.get(key)
        for name, inner in named.items() if isinstance(named, dict) else ():
            if isinstance(inner, dict):
                yield "properties", name, inner
    if isinstance(inner := atom.get("additionalProperties"), dict):
        yield "additionalProperties", "", inner
    for key in ("items", "prefixItems", "additionalItems"):
        for inner in _dicts(atom.get(key)):
            yield "items", "", inner


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
