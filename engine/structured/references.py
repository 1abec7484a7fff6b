"""References within one JSON schema: from `$ref` to what it stands for, by `$id`, `$anchor` and pointers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object within, those around others first."""
    return (each for each, _ in _objects(schema))


class References:
    """What the references of one schema stand for. Where two parts have one name both are found, for one of them may be
    data."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._bases: dict[int, str] = {}
        self._found: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._found["", ""].append(root)
        for each, around in _objects(root):
            base = self._bases[id(around)] if around is not None else ""
            name = each.get("$id", each.get("id"))
            if isinstance(name, str) and name.startswith("#"):
                self._found[base, name[1:]].append(each)
            elif isinstance(name, str):
                base = _joined(base, name)
                self._found[base, ""].append(each)
            if isinstance(anchor := each.get("$anchor"), str):
                self._found[base, anchor].append(each)
            self._bases[id(each)] = base

    def of(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """What the `$ref` of a part stands for; nothing for one without, and for one to elsewhere."""
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return []
        resource, _, place = reference.partition("#")
        base = self._bases.get(id(part), "")
        base = _joined(base, resource) if resource else base
        if not place.startswith("/"):
            return self._found.get((base, place), [])
        found = (_at(root, unquote(place)) for root in self._found.get((base, ""), ()))
        return [each for each in found if isinstance(each, dict)]


def _objects(schema: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Every object within, and the next around it."""
    waiting: list[tuple[Any, dict[str, Any] | None]] = [(schema, None)]
    while waiting:
        each, around = waiting.pop()
        if isinstance(each, dict):
            yield each, around
            waiting += ((inner, each) for inner in each.values())
        elif isinstance(each, list):
            waiting += ((inner, around) for inner in each)


def _joined(base: str, name: str) -> str:
    try:
        return urldefrag(urljoin(base, name)).url
    except ValueError:
        return name


def _at(value: Any, place: str) -> Any:
    for step in place.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(name)] if name.isdecimal() and int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value
