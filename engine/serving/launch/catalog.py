"""The entries of a model repository, and which of them still wait for a checkpoint."""

from __future__ import annotations

import compileall
import re
from pathlib import Path

import msgspec

_LLM = "engine.serving.llm_model"
_PARAMETER = re.compile(
    r'key\s*:\s*"([^"]+)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"((?:[^"\\]|\\.)*)"', re.DOTALL
)
_MODEL = re.compile(r'key\s*:\s*"model"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"([^"]+)"')


class Entry(msgspec.Struct, frozen=True):
    """A folder with a config.pbtxt. awaits: where a checkpoint belongs that is not there yet."""

    name: str
    awaits: Path | None = None


def entries(repository: Path) -> list[Entry]:
    """All entries, by name. One waits when its parameter `model` names a place inside it that is empty; a path to
    somewhere else that leads nowhere is a mistake, which the load reports."""
    return [_entry(config) for config in sorted(repository.glob("*/config.pbtxt"))]


def llm_parameters(folder: Path) -> dict[str, str] | None:
    """The parameters of an LLM's entry, as config.pbtxt has them; None of another entry."""
    if not any(_LLM in model_py.read_text() for model_py in folder.glob("*/model.py")):
        return None
    return parameters(folder)


def parameters(folder: Path) -> dict[str, str]:
    """Those of an entry's config.pbtxt."""
    lines = (folder / "config.pbtxt").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return {key: _unquoted(value) for key, value in _PARAMETER.findall(text)}


def compile_ahead(model_py: Path) -> None:
    """Write the bytecode of a model.py, where its folder can be written. Else a stub does during the first load, the
    server takes that for a change of the model, and the next load starts all of it anew."""
    compileall.compile_file(model_py, quiet=2)


def _entry(config: Path) -> Entry:
    folder = config.parent
    found = _MODEL.search(config.read_text())
    if found is None or Path(found[1]).is_absolute() or (folder / found[1]).exists():
        return Entry(folder.name)
    return Entry(folder.name, awaits=folder / found[1])


def _unquoted(text: str) -> str:
    try:
        return str(msgspec.json.decode(f'"{text}"'.encode()))
    except msgspec.DecodeError:
        return text
