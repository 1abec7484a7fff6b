"""A GGUF file's header: its metadata, and where the bytes of its tensors are. No tensor's bytes are read here.

Version 3, little-endian, of ggml's docs/gguf.md: magic, version, counts, keys and values, tensor entries, the data.
The `gguf` package's reader has no bounds on counts and lengths, so a broken file could keep it busy for hours;
everything here is bounded before it is read.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from engine import files
from engine.types import shown

Value = bool | int | float | str | tuple[bool, ...] | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]

MAGIC = b"GGUF"
VERSION = 3
# Bounds that no release comes near: vocabularies of 262,144 tokens take about 10 MB.
MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 10_000
MAX_ITEMS = 4_000_000  # of all arrays of a file
MAX_TENSORS = 100_000  # of all files
MAX_DIMS = 4
MAX_FILES = 512
_MAX_ALIGNMENT = 1 << 20
_MAX_NAME = 200  # characters of a name in a message
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<at>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

# Scalars by their number in a file, in struct's letters. Strings are 8 and arrays 9.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """A GGUF file that cannot be used. The message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor type stores values: `num_bytes` for every `num_values` along the last dimension."""

    name: str
    num_values: int
    num_bytes: int


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    20: BlockFormat("IQ4_NL", 32, 18),
    23: BlockFormat("IQ4_XS", 256, 136),
    30: BlockFormat("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor on disk: [start, start + num_bytes) of `file`. `shape` is row-major: the file stores it reversed."""

    name: str
    file: Path
    start: int
    format: BlockFormat
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.format.num_values * self.format.num_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata of a file, or of the first of several, and the tensors of all by name."""

    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) else ""

    def recognised(self) -> str:
        """For a message: the architecture, how many tensors there are, and how many of each format."""
        counts = Counter(tensor.format.name for tensor in self.tensors.values())
        formats = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return (
            f"a GGUF of architecture {shown(self.architecture) or 'unknown'}, {len(self.tensors)} tensors ({formats})"
        )


def open_gguf(path: str | Path) -> GgufFile:
    """Read the header of `path`, and of the files after it where it is the first of several (`-00001-of-00003.gguf`).

    Raises GgufError when a file is missing, broken or cut short, or has a tensor type that is not implemented.
    """
    path = Path(path)
    metadata, tensors = _header(path)
    count = _whole(metadata, "split.count", path, 1)
    if count <= 1:
        return GgufFile(metadata, _joined([tensors]))
    parts = [tensors]
    for at, other in enumerate(_others(path, metadata, count), 1):
        about, tensors = _header(other)
        if (_whole(about, "split.no", other, -1), _whole(about, "split.count", other, 1)) != (at, count):
            raise GgufError(f"{other} does not say that it is file {at + 1} of {count}, as its name does")
        parts.append(tensors)
        if sum(map(len, parts)) > MAX_TENSORS:
            raise GgufError(
                f"{path} and the files after it hold more than {MAX_TENSORS} tensors, the most that are read"
            )
    joined = _joined(parts)
    stated = _whole(metadata, "split.tensors.count", path, len(joined))
    if stated != len(joined):
        raise GgufError(f"{path} says that its {count} files hold {stated} tensors; they hold {len(joined)}")
    return GgufFile(metadata, joined)


def _others(path: Path, metadata: dict[str, Value], count: int) -> list[Path]:
    """The files after the first, from its name."""
    named = _SPLIT.fullmatch(path.name)
    if count > MAX_FILES:
        raise GgufError(f"{path} is one of {count} files; at most {MAX_FILES} are read")
    if named is None or int(named["count"]) != count:
        raise GgufError(f"{path} is one of {count} files, and its name must end in -00001-of-{count:05}.gguf")
    if int(named["at"]) != 1 or _whole(metadata, "split.no", path, 0) != 0:
        raise GgufError(f"{path} is not the first of its {count} files: give {named['stem']}-00001-of-{count:05}.gguf")
    return [path.with_name(f"{named['stem']}-{at:05}-of-{count:05}.gguf") for at in range(2, count + 1)]


def _joined(parts: list[list[Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for tensor in itertools.chain.from_iterable(parts):
        before = tensors.setdefault(tensor.name, tensor)
        if before is not tensor:
            label = shown(tensor.name, _MAX_NAME)
            raise GgufError(f"tensor {label} is stored twice, in {before.file} and in {tensor.file}")
    return tensors


def _whole(metadata: dict[str, Value], key: str, file: Path, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise GgufError(f"{file}: {key} must be a whole number")
    return value


class _Cursor:
    """A place in a header's bytes. Every read checks that the bytes are there before it takes them."""

    def __init__(self, file: Path, text: bytes) -> None:
        self.file, self.text, self.at, self.items = file, text, 0, 0

    def take(self, count: int) -> bytes:
        if count > len(self.text) - self.at:
            most = (
                f", or the header has more than {MAX_HEADER_BYTES} bytes" if len(self.text) == MAX_HEADER_BYTES else ""
            )
            raise GgufError(f"{self.file} is cut short or broken in its header{most}")
        self.at += count
        return self.text[self.at - count : self.at]

    def number(self, letter: str) -> int:
        return int(struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0])

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise GgufError(f"{self.file} holds a string that is not UTF-8: {shown(repr(raw[:40]))}") from None

    def value(self, key: str) -> Value:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> Value:
        kind, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > MAX_ITEMS:
            raise GgufError(
                f"{self.file}: arrays up to {shown(key)} hold {self.items} items; at most {MAX_ITEMS} are read"
            )
        if kind == _STRING:
            return tuple(self.string() for _ in range(count))
        if kind == _ARRAY:
            raise GgufError(f"{self.file}: {shown(key)} is an array of arrays, which no known model has")
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> tuple:
        letter = _SCALARS.get(kind)
        if letter is None:
            raise GgufError(
                f"{self.file}: {shown(key)} has the value type {kind}, which GGUF {VERSION} does not define"
            )
        return struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(f"<{letter}")))


def _header(file: Path) -> tuple[dict[str, Value], list[Tensor]]:
    try:
        with files.open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            cursor = _Cursor(file, stream.read(min(size, MAX_HEADER_BYTES)))
    except OSError as error:
        raise GgufError(f"{file} cannot be read: {error.strerror}") from None
    if cursor.text[:4] != MAGIC:
        raise GgufError(f"{file} is no GGUF file: it does not begin with the letters GGUF")
    cursor.take(4)
    version = cursor.number("I")
    if version != VERSION:
        order = " (or it is big-endian)" if version & 0xFFFF == 0 else ""
        raise GgufError(f"{file} is GGUF version {version}{order}; version {VERSION}, little-endian, is read")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    for what, count, most in (("tensors", num_tensors, MAX_TENSORS), ("metadata keys", num_keys, MAX_KEYS)):
        if count > most:
            raise GgufError(f"{file} says that it holds {count} {what}; at most {most} are read")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise GgufError(f"{file} names the metadata key {shown(key, _MAX_NAME)} more than once")
        metadata[key] = cursor.value(key)
    alignment = _whole(metadata, "general.alignment", file, 32)
    if not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise GgufError(f"{file}: general.alignment is {alignment}; multiples of 8 up to {_MAX_ALIGNMENT} are read")
    placed = [_tensor(cursor, alignment) for _ in range(num_tensors)]
    data = -(-cursor.at // alignment) * alignment
    tensors = [Tensor(name, file, data + offset, kind, shape) for name, offset, kind, shape in placed]
    _check_places(file, tensors, size)
    return metadata, tensors


def _tensor(cursor: _Cursor, alignment: int) -> tuple[str, int, BlockFormat, tuple[int, ...]]:
    """Name, offset in the data, format and shape of the next tensor."""
    name = cursor.string()
    label = f"{cursor.file}: tensor {shown(name, _MAX_NAME)}"
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise GgufError(f"{label} has {num_dims} dimensions; 1 to {MAX_DIMS} are read")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in FORMATS:
        known = ", ".join(block.name for block in FORMATS.values())
        raise GgufError(f"{label} has the type number {kind}, which is not implemented; implemented: {known}")
    if 0 in shape or shape[-1] % FORMATS[kind].num_values:
        block = FORMATS[kind]
        raise GgufError(f"{label} has the shape {shape}; {block.name} wants rows of whole blocks of {block.num_values}")
    if offset % alignment:
        raise GgufError(f"{label} lies at {offset}, which is no multiple of the file's alignment {alignment}")
    return name, offset, FORMATS[kind], shape


def _check_places(file: Path, tensors: list[Tensor], size: int) -> None:
    """Every tensor's bytes are in the file, and no two share any."""
    for tensor in tensors:
        if tensor.start + tensor.num_bytes > size:
            label = shown(tensor.name, _MAX_NAME)
            raise GgufError(f"{file}: the bytes of tensor {label} are missing, the file is cut short or broken")
    for before, after in itertools.pairwise(sorted(tensors, key=lambda tensor: tensor.start)):
        if after.start < before.start + before.num_bytes:
            names = " and ".join(shown(tensor.name, _MAX_NAME) for tensor in (before, after))
            raise GgufError(f"{file}: tensors {names} lie in the same bytes, it is broken")
