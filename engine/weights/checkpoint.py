"""A Hugging Face checkpoint on disk: which tensors it holds, where their bytes are, and reading byte ranges of them.

Only headers are read when it is opened (safetensors: 8 bytes of length, a JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from engine import files
from engine.types import shown
from engine.weights.rules import Shape

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
RUN_IN = (torch.float32, torch.bfloat16, torch.float16)
# Of one file, and of the index: bounds that no release comes near and that are read within a second.
MAX_HEADER_BYTES = 16 << 20
MAX_FILES = 10_000
MAX_TENSORS = 100_000
MAX_DIMS = 8
_MAX_NAME = 200  # characters of a tensor's name in a message


class WeightsError(ValueError):
    """Weights that cannot be used. The message names the file or the tensors."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor on disk: its bytes are [start, start + num_bytes) of `file`, or with a `pitch` the first `row_bytes` of
    every `pitch` from `start` on: a matrix's columns that one rank takes.

    blocks: the name of a GGUF file's format, of which dtype and shape are those of bytes. paired: rows of a head whose
    halves stand pair by pair in the file, 0 where they stand as they are. offset: what the file has too much in each
    number. joined: the tensors that it is made of, one behind the other along the first dimension, or with `across`
    along the second; none for one. of_share: it says which groups those inputs are of that one rank takes, by the
    numbers of all groups.
    """

    name: str
    file: Path
    start: int
    dtype: torch.dtype
    shape: Shape
    pitch: int | None = None
    blocks: str | None = None
    paired: int = 0
    offset: float = 0.0
    joined: tuple[Entry, ...] = ()
    of_share: bool = False
    across: bool = False

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one entry of the first dimension."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def parts(self) -> tuple[Entry, ...]:
        """What can be read at once, in order of rows, or of columns where they stand across."""
        return self.joined or (self,)

    @property
    def span(self) -> int:
        """Bytes from the first to the last, with those between that belong to others. Not of joined ones."""
        if self.pitch is None or not self.num_bytes:
            return self.num_bytes
        return (self.shape[0] - 1) * self.pitch + self.row_bytes

    def rows(self, start: int, stop: int) -> Entry:
        """The entries [start, stop) of the first dimension."""
        at = self.start + start * (self.pitch or self.row_bytes)
        return replace(self, start=at, shape=(stop - start, *self.shape[1:]))

    def runs(self, runs: Sequence[tuple[int, int]]) -> Entry:
        """The entries [start, stop) of the first dimension, of each run in turn."""
        return _joined([self.rows(start, stop) for start, stop in runs], 0)

    def columns(self, start: int, stop: int) -> Entry:
        """The entries [start, stop) of a matrix's second dimension."""
        rows, _ = self.shape
        at = self.start + start * self.dtype.itemsize
        return replace(self, start=at, shape=(rows, stop - start), pitch=self.pitch or self.row_bytes)

    def column_runs(self, runs: Sequence[tuple[int, int]]) -> Entry:
        """The entries [start, stop) of a matrix's second dimension, of each run in turn."""
        return _joined([self.columns(start, stop) for start, stop in runs], 1)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes stand in the file as they stand in the tensor."""
        return self.pitch is None and not (self.paired or self.offset or self.joined)

    def as_bytes(self) -> Entry:
        """The same bytes as numbers of 8 bits."""
        *rows, last = self.shape or (1,)
        shape, joined = (*rows, last * self.dtype.itemsize), tuple(part.as_bytes() for part in self.joined)
        # `replace` takes several times as long, which tells with 100,000 tensors of experts.
        about = (self.pitch, self.blocks, self.paired, self.offset, joined)
        return Entry(self.name, self.file, self.start, torch.uint8, shape, *about, across=self.across)

    def tensor(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor in `raw`, its `span` bytes."""
        held = self._rows(raw).contiguous()
        if self.paired:
            held = held.unflatten(0, (-1, self.paired // 2, 2)).transpose(1, 2).flatten(0, 2)
        return held - self.offset if self.offset else held

    def copy(self, raw: torch.Tensor, view: torch.Tensor) -> None:
        """Copy the tensor in `raw`, its `span` bytes, into `view` of its shape: once, where numbers stay."""
        held = self._rows(raw)
        if self.paired:
            held = held.unflatten(0, (-1, self.paired // 2, 2)).transpose(1, 2)
            view = view.unflatten(0, (-1, 2, self.paired // 2))
        view.copy_(held - self.offset if self.offset else held)

    def _rows(self, raw: torch.Tensor) -> torch.Tensor:
        if self.pitch is not None:
            raw = raw.as_strided((self.shape[0], self.row_bytes), (self.pitch, 1))
        return raw.view(self.dtype).view(self.shape)


def _joined(parts: Sequence[Entry], along: int) -> Entry:
    """One behind the other along that dimension."""
    first, *more = parts
    if not more:
        return first
    shape = list(first.shape)
    shape[along] = sum(part.shape[along] for part in parts)
    return replace(first, shape=tuple(shape), joined=tuple(parts), across=bool(along))


class Checkpoint:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read headers: of the files in model.safetensors.index.json, else of model.safetensors, else of all files.

        Raises WeightsError when a file is missing, broken or cut short, or when a tensor is stored twice.
        """
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        if index.exists():
            placed = _placed(index)
            stored = [folder / name for name in sorted(set(placed.values()))]
        else:
            placed, single = {}, folder / "model.safetensors"
            stored = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if not stored:
            raise WeightsError(f"{folder} holds no *.safetensors file, the one format that weights are read from")
        entries: dict[str, Entry] = {}
        for file in stored:
            for entry in _header(file):
                if entry.name in entries:
                    raise WeightsError(f"tensor {entry.name} is stored in both {entries[entry.name].file} and {file}")
                entries[entry.name] = entry
        lost = sorted(name for name in placed if name not in entries)
        if lost:
            raise WeightsError(f"{index.name} lists tensors that its files do not hold: {listed(lost)}")
        return cls(entries)

    def renamed(self, rename: Callable[[str], str]) -> Checkpoint:
        """The same tensors under other names. Raises WeightsError when two would share one."""
        entries: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            other = entries.setdefault(rename(name), entry)
            if other is not entry:
                raise WeightsError(f"tensors {other.name} and {name} are two names of the same weights; remove one")
        return Checkpoint(entries)

    def flattened(self) -> Checkpoint:
        """The same with scales of blocks as matrices, which modelopt may store as [rows, 1, columns, 1]."""
        entries = dict(self.entries)
        for name, entry in self.entries.items():
            if name.endswith(".weight_scale") and len(entry.shape) == 4 and entry.shape[1::2] == (1, 1):
                entries[name] = replace(entry, shape=entry.shape[::2])
        return Checkpoint(entries)

    @property
    def dtype(self) -> torch.dtype:
        """That of the first tensor, by name, that has one that models run in; else float32."""
        kinds = (self.entries[name].dtype for name in sorted(self.entries))
        return next((kind for kind in kinds if kind in RUN_IN), torch.float32)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())


class Files:
    """Open files to read ranges of, one descriptor a file, shared by threads (reads carry their own offset)."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def open(self, file: Path) -> None:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)

    def read_into(self, file: Path, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` from `start` on. Raises WeightsError when the file ends before."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptors[file], [buffer[done:]], start + done)
            if count == 0:
                raise WeightsError(f"{file} ends {len(buffer) - done} bytes early: it was changed or cut short")
            done += count

    def tensor(self, entry: Entry) -> torch.Tensor:
        """A tensor that is one part, read whole. Raises WeightsError as `read_into`."""
        raw = torch.empty(entry.span, dtype=torch.uint8)
        self.open(entry.file)
        self.read_into(entry.file, entry.start, raw.numpy().data)
        return entry.tensor(raw)


def _placed(index: Path) -> dict[str, str]:
    """Each tensor's file, as the index says."""
    try:
        placed = _parse(files.read(index, files.MAX_INDEX_BYTES), index).get("weight_map")
    except OSError as error:
        raise WeightsError(f"{index} cannot be read: {error.strerror}") from None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise WeightsError(f"{index} must hold weight_map, an object of a file name for each tensor")
    named = set(placed.values())
    if len(named) > MAX_FILES:
        raise WeightsError(f"{index} names {len(named)} files; at most {MAX_FILES} are read")
    for name in named:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise WeightsError(
                f"{index} names the file {shown(name)!r}: only files of the same folder are read, named without a path"
            )
    return placed


def _header(file: Path) -> list[Entry]:
    try:
        header = files.safetensors_header(file, MAX_HEADER_BYTES)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from None
    if header is None:
        raise WeightsError(f"{file} is no safetensors file, or it is cut short in its header")
    text, length, size = header.text, header.length, header.size
    if length > MAX_HEADER_BYTES:
        raise WeightsError(f"{file} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
    count = text.count(b'"data_offsets"')
    if count > MAX_TENSORS:
        raise WeightsError(f"{file} holds {count} tensors; at most {MAX_TENSORS} of one file are read")
    table = _parse(text, file)
    entries = []
    for name, about in table.items():
        if name == "__metadata__":
            continue
        label = shown(name, _MAX_NAME)
        try:
            dtype, shape, (start, end) = str(about["dtype"]), tuple(about["shape"]), about["data_offsets"]
            if len(shape) > MAX_DIMS:
                raise WeightsError(f"{file}: tensor {label} has {len(shape)} dimensions; at most {MAX_DIMS} are read")
            if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
                raise ValueError
        except WeightsError:
            raise
        except (KeyError, TypeError, ValueError):
            raise WeightsError(f"{file}: the header's entry for {label} is broken") from None
        if dtype not in DTYPES:
            raise WeightsError(f"{file}: tensor {label} has dtype {shown(dtype)}, which is not implemented")
        entry = Entry(name, file, 8 + length + start, DTYPES[dtype], shape)
        if entry.num_bytes != end - start or entry.start + entry.num_bytes > size:
            raise WeightsError(f"{file}: the bytes of tensor {label} are missing, the file is cut short or broken")
        entries.append(entry)
    for before, entry in itertools.pairwise(sorted(entries, key=lambda e: (e.start, e.num_bytes))):
        if entry.start < before.start + before.num_bytes:
            raise WeightsError(f"{file}: tensors {before.name} and {entry.name} lie in the same bytes, it is broken")
    return entries


def _parse(text: bytes, file: Path) -> dict:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, file))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} holds no readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _once(pairs: list[tuple[str, Any]], file: Path) -> dict[str, Any]:
    """A JSON object, whose names must differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise WeightsError(f"{file} names {listed(twice)} more than once")
    return made


def listed(names: list[str], most: int = 8, separator: str = ", ") -> str:
    """Names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(shown(name, _MAX_NAME) for name in names[:most]) + more
