"""The JSON schemas among the files of installed packages."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

LARGEST = 4 << 20
_LOCAL = re.compile(r'#/(definitions|\$defs)/([^"/]+)')


def shipped(every: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the first file's name, schema) of each that differs from the others, or of one of `every`. What a schema refers
    to in a file beside it becomes a part of it: no request has other files."""
    folder = Path(sysconfig.get_paths()["purelib"])
    files = sorted(file for file in folder.rglob("*.json") if file.stat().st_size <= LARGEST)
    seen: set[int] = set()
    for file in files[::every]:
        made = _read(file)
        if not isinstance(made, dict) or not ("$schema" in made or isinstance(made.get("properties"), dict)):
            continue
        made = _whole(made, file.parent)
        told = hash(json.dumps(made))
        if told not in seen:
            seen.add(told)
            yield str(file.relative_to(folder)), made


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError):
        return None


_definitions = cache(_read)


def _whole(schema: dict[str, Any], folder: Path) -> dict[str, Any]:
    used: dict[str, dict[str, Any]] = {"definitions": {}, "$defs": {}}
    made = _moved(schema, folder, used)
    return made | {key: {**made.get(key, {}), **parts} for key, parts in used.items() if parts}


def _moved(value: Any, folder: Path, used: dict[str, dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [_moved(each, folder, used) for each in value]
    if not isinstance(value, dict):
        return value
    file, _, place = str(value.get("$ref", "")).partition("#")
    named = _LOCAL.fullmatch(f"#{place}")
    beside = folder / file.rsplit("/", 1)[-1]
    if not file or named is None or not beside.is_file():
        return {key: _moved(each, folder, used) for key, each in value.items()}
    left = [(named[1], named[2])]
    while left:
        key, name = left.pop()
        if name not in used[key]:
            used[key][name] = _definitions(beside)[key][name]
            left += _LOCAL.findall(json.dumps(used[key][name]))
    return {**value, "$ref": f"#{place}"}
