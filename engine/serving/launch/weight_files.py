"""Whether the files of a checkpoint's weights are there; what they hold is read when the model loads. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine import files
from engine.models.reader import ConfigError
from engine.types import shown

_OTHERS = (".bin", ".pt", ".pth")
# What a clone without Git LFS has in place of a large file begins so.
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_HEADER_BYTES = 16 << 20  # that the loader reads
_ENDS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})')


def check(folder: Path) -> None:
    """Raises ConfigError for a folder without weights, without some of the files that its index names, with what only
    points to them, or with files that hold no tensor or are cut short."""
    named = _indexed(folder / "model.safetensors.index.json")
    lost = [name for name in named if not (folder / name).is_file()]
    if lost:
        raise ConfigError(
            f"{folder} lacks {len(lost)} of the {len(named)} files that its index names, {shown(lost[0])} among them: "
            "fetch it again, or wait until it is whole"
        )
    weights = [file for end in ("safetensors", "gguf") for file in sorted(folder.glob(f"*.{end}")) if file.is_file()]
    pointers = [file.name for file in (*weights, folder / "tokenizer.json") if _points(file)]
    if pointers:
        raise ConfigError(
            f"{folder / pointers[0]} is not the file, and points to it, as {len(pointers)} of the folder's files do: "
            "they were cloned without Git LFS. Run `git lfs pull` there, or fetch them by nereid add ORG/NAME"
        )
    if weights:
        _check_headers(folder, [folder / name for name in named])
        return
    others = sorted({file.suffix for file in folder.iterdir()} & set(_OTHERS))
    held = f" (it has {', '.join(others)})" if others else ""
    raise ConfigError(f"{folder} holds no *.safetensors file{held}, the one format that weights are read from")


def _check_headers(folder: Path, named: list[Path]) -> None:
    """The files that the loader reads: those of the index, else model.safetensors, else all."""
    single = folder / "model.safetensors"
    read = named or ([single] if single.is_file() else sorted(folder.glob("*.safetensors")))
    counts = [_tensors(file) for file in read if file.is_file()]
    if counts and not any(counts):
        raise ConfigError(f"{read[0]} holds no tensor, so there are no weights to serve: fetch the checkpoint again")


def _tensors(file: Path) -> int:
    """How many tensors a safetensors file describes. Raises ConfigError for one that is not whole."""
    try:
        header = files.safetensors_header(file, _MAX_HEADER_BYTES)
        if header is None:
            held = "is no safetensors file, or it is cut short in its header" if file.stat().st_size else "is empty"
            raise ConfigError(f"{file} {held}: fetch it again, or wait until it is whole")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    ends = [int(end) for end in _ENDS.findall(header.text)]
    if ends and (lost := 8 + header.length + max(ends) - header.size) > 0:
        raise ConfigError(f"{file} is cut short by {lost} bytes: fetch it again, or wait until it is whole")
    return len(ends)


def _points(file: Path) -> bool:
    try:
        with files.open_regular(file) as stream:
            return stream.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _indexed(index: Path) -> list[str]:
    """The files that an index of weights names; none where it is not there, or is not of its form."""
    try:
        said = json.loads(files.read(index, files.MAX_INDEX_BYTES))
        return sorted({str(name) for name in said["weight_map"].values()})
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return []
