"""Parts of a JSON schema that refer to themselves without end, as an object does that requires another of its kind."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from engine.structured import keywords
from engine.structured.references import References
from engine.types import shown


def check(schema: dict[str, Any]) -> None:
    """Raises ValueError with a `$ref` that no finite value satisfies. Linear in the size of the schema."""
    references = References(schema)
    parts = _reached(schema, references)
    if not any("$ref" in part for part in parts):
        return
    waiting: dict[int, int] = {}  # for so many of its needs, by part
    users: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # a part's: the part, and which of its needs
    ended: list[int] = []
    for part in parts:
        needs = _needs(part, references)
        waiting[id(part)] = len(needs)
        for place, need in enumerate(needs):
            for each in need:
                users[id(each)].append((id(part), place))
        if not needs:
            ended.append(id(part))
    met: set[tuple[int, int]] = set()
    while ended:
        for user in users[ended.pop()]:
            if user not in met:
                met.add(user)
                waiting[user[0]] -= 1
                if not waiting[user[0]]:
                    ended.append(user[0])
    for part in parts:
        if waiting[id(part)] and "$ref" in part:
            raise ValueError(f"$ref {shown(repr(part['$ref']))} leads to itself without end, so nothing satisfies it")


def _reached(root: dict[str, Any], references: References) -> list[dict[str, Any]]:
    """The schemas that a value may be held to: no definitions that nothing refers to."""
    found: dict[int, dict[str, Any]] = {}
    left: list[dict[str, Any]] = [root]
    while left:
        part = left.pop()
        if id(part) not in found:
            found[id(part)] = part
            left += (each for each in keywords.within(part, definitions=False) if isinstance(each, dict))
            left += references.of(part)
    return list(found.values())


def _needs(part: dict[str, Any], references: References) -> list[list[dict[str, Any]]]:
    """Of each of these one has to have an end, that the part has one."""
    needs = [references.of(part), *([each] for each in _dicts(part.get("allOf")))]
    for key in ("anyOf", "oneOf"):
        if all(isinstance(each, dict) for each in part.get(key) or ()):
            needs.append(_dicts(part.get(key)))
    properties, required = part.get("properties"), part.get("required")
    if part.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needs += (_dicts([properties.get(name)]) for name in required if isinstance(name, str))
    fewest = part.get("minItems")
    if part.get("type") == "array" and isinstance(fewest, int | float) and fewest >= 1 and "prefixItems" not in part:
        needs.append(_dicts([part.get("items")]))
    return [need for need in needs if need]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
