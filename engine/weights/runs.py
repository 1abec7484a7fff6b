"""What of a checkpoint's bytes fills which parameters, cut and joined into what is read at once.

Large sources are read and made part by part where that is the same. Small ones that stand beside each other in a file
are joined for a GPU, where a read and a copy take longer than their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch

from engine.weights.checkpoint import Entry, WeightsError
from engine.weights.rules import Shape, Transform

BUFFER_BYTES = 16 << 20
# What is made at once: on a CPU the numbers in between stay in its caches. On a GPU one launch makes a part.
MADE_BYTES = {"cpu": {"rows": 1 << 20, "columns": 4 << 20}, "cuda": {"rows": BUFFER_BYTES, "columns": BUFFER_BYTES}}
# What is joined.
JOINED_BYTES = {"cpu": 0, "cuda": BUFFER_BYTES}
# Of tensors that are in a buffer together; those of one read stand as in the file.
ALIGNMENT, READ_ALIGNMENT = 64, 16
# What a read may bring that nobody asked for, between two pieces.
GAP_BYTES = 64 << 10


class _HasEntries(Protocol):
    @property
    def entries(self) -> tuple[Entry, ...]: ...


class _OfEntries:
    """What fills parameters of some tensors of files."""

    __slots__ = ()

    @property
    def parts(self: _HasEntries) -> list[Entry]:
        """What can be read at once."""
        return [part for entry in self.entries for part in entry.parts]

    @property
    def num_bytes(self: _HasEntries) -> int:
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Piece(_OfEntries):
    """One source and the part of a parameter that it fills. beside: others whose rows lie between its own."""

    entry: Entry
    view: torch.Tensor
    beside: tuple[Piece, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry, *(piece.entry for piece in self.beside))

    @property
    def target(self) -> torch.Tensor | None:
        """The parameter's bytes, where they are the file's."""
        same = self.entry.is_plain and self.entry.dtype == self.view.dtype and self.view.is_contiguous()
        return self.view.reshape(-1).view(torch.uint8) if same and not self.beside else None

    def fill(self, raw: Sequence[torch.Tensor]) -> None:
        """Of the bytes of each of `parts`."""
        for piece, own in zip((self, *self.beside), raw, strict=True):
            piece.entry.copy(own, piece.view)


@dataclass(frozen=True, slots=True)
class Made(_OfEntries):
    """A source's tensors, and for each parameter that `transform` fills the consecutive rows that hold what it makes
    of them."""

    entries: tuple[Entry, ...]
    views: tuple[tuple[torch.Tensor, ...], ...]
    transform: Transform

    @property
    def shape(self) -> Shape:
        """Of all views of the first parameter together."""
        views = self.views[0]
        return (sum(len(view) for view in views), *views[0].shape[1:])

    def fill(self, raw: Sequence[torch.Tensor]) -> None:
        """Of the bytes of each of `parts`. Raises WeightsError where the transform does, with the source's name."""
        own, tensors = iter(raw), []
        for entry in self.entries:
            held = [part.tensor(next(own)) for part in entry.parts]
            tensors.append(held[0] if len(held) == 1 else torch.cat(held, dim=int(entry.across)))
        try:
            made = self.transform(tensors, self.shape)
        except WeightsError as error:
            raise WeightsError(f"{self.entries[0].name}: {error}") from None
        for views, whole in zip(self.views, made if isinstance(made, tuple) else (made,), strict=True):
            for view, part in zip(views, whole.split([len(view) for view in views]), strict=True):
                view.copy_(part)


@dataclass(frozen=True, slots=True)
class Read:
    """`count` bytes of a file from `start` on, which stand from `at` on in a run's."""

    file: Path
    start: int
    count: int
    at: int

    def split(self, most: int) -> Iterator[Read]:
        """Reads of up to `most` bytes each, one at least."""
        for done in range(0, max(self.count, 1), most):
            yield Read(self.file, self.start + done, min(most, self.count - done), self.at + done)


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces that one read brings, the bytes [start, end) of a file; or one piece, whose parts are a read each."""

    chunks: tuple[Piece | Made, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def target(self) -> torch.Tensor | None:
        """The bytes of a parameter, where all that is to be done is to read them."""
        first = self.chunks[0]
        return first.target if isinstance(first, Piece) and len(self.chunks) == 1 else None

    @property
    def reads(self) -> list[Read]:
        parts = self.chunks[0].parts
        if not self._is_apart:
            return [Read(parts[0].file, self.start, self.end - self.start, 0)]
        places = self._places
        return [Read(part.file, part.start, part.span, at) for part, at in zip(parts, places, strict=True)]

    @property
    def size(self) -> int:
        """Bytes of what `fill` takes."""
        last = self.reads[-1]
        return last.at + last.count

    def fill(self, raw: torch.Tensor) -> None:
        """Fill the parameters of the bytes that `reads` bring, where these did not go to `target`. Raises WeightsError
        as `Made.fill`."""
        if self.target is not None:
            return
        if self._is_apart:
            first = self.chunks[0]
            first.fill([raw[at:][: part.span] for part, at in zip(first.parts, self._places, strict=True)])
            return
        for chunk in self.chunks:
            chunk.fill([raw[part.start - self.start :][: part.span] for part in chunk.parts])

    @property
    def _is_apart(self) -> bool:
        return len(self.chunks) == 1 and isinstance(self.chunks[0], Made)

    @property
    def _places(self) -> list[int]:
        places, size = [], 0
        for part in self.chunks[0].parts:
            places.append(size)
            size += part.span + -part.span % ALIGNMENT
        return places


def runs(pieces: Iterable[Piece | Made], device: torch.device) -> list[Run]:
    """All of them in file order, so that each can be read and filled by itself."""
    made_bytes, most = MADE_BYTES[device.type], JOINED_BYTES[device.type]
    chunks = sorted(chain.from_iterable(_chunks(piece, made_bytes) for piece in pieces), key=_place)
    return list(_joined(_together(chunks), most))


def _place(piece: Piece | Made) -> tuple[Path, int]:
    entry = piece.entries[0]
    return entry.file, entry.start


def _chunks(piece: Piece | Made, made_bytes: dict[str, int]) -> Iterator[Piece | Made]:
    """Cut a piece along its first dimension into parts of about BUFFER_BYTES."""
    if isinstance(piece, Made):
        yield from _made_chunks(piece, made_bytes)
        return
    entry, view = piece.entry, piece.view
    if entry.joined:
        along = int(entry.across)
        sizes = [part.shape[along] for part in entry.joined]
        for part, own in zip(entry.joined, view.split(sizes, along), strict=True):
            yield from _chunks(Piece(part, own), made_bytes)
        return
    if entry.span <= BUFFER_BYTES or view.dim() == 0:
        yield piece
        return
    rows, least = BUFFER_BYTES // (entry.pitch or entry.row_bytes), entry.paired or 1
    rows = max(least, rows // least * least)
    for at in range(0, entry.shape[0], rows):
        end = min(at + rows, entry.shape[0])
        yield Piece(entry.rows(at, end), view[at:end])


def _made_chunks(piece: Made, made_bytes: dict[str, int]) -> Iterator[Made]:
    """Cut what is made as its transform allows it."""
    cut: str | None = getattr(piece.transform, "cut", None)
    entry, size = piece.entries[0], BUFFER_BYTES if cut is None else min(BUFFER_BYTES, made_bytes[cut])
    alone = all(len(views) == 1 for views in piece.views)
    if cut is None or entry.joined or entry.paired or not alone or entry.span <= size:
        yield piece
        return
    count = entry.shape[0]
    # Rows of a source that make a row, or a column.
    each, rest = (1, 0) if cut == "rows" else divmod(count, piece.shape[1])
    if rest:
        yield piece
        return
    rows = max(1, size // (entry.pitch or entry.row_bytes) // each) * each
    for at in range(0, count, rows):
        end = min(at + rows, count)
        if cut == "rows":
            views = tuple((view[at:end],) for (view,) in piece.views)
        else:
            views = tuple((view[:, at // each : end // each],) for (view,) in piece.views)
        yield replace(piece, entries=(entry.rows(at, end), *piece.entries[1:]), views=views)


def _together(chunks: Iterable[Piece | Made]) -> Iterator[Piece | Made]:
    """Pieces in file order, those whose rows alternate joined to the first of them."""
    held: Piece | None = None
    for chunk in chunks:
        if held is not None and isinstance(chunk, Piece) and _alternate(held.entry, chunk.entry):
            held = replace(held, beside=(*held.beside, chunk))
            continue
        if held is not None:
            yield held
        held = chunk if isinstance(chunk, Piece) else None
        if held is None:
            yield chunk
    if held is not None:
        yield held


def _alternate(first: Entry, other: Entry) -> bool:
    pitch = first.pitch
    return (
        pitch is not None
        and (first.file, pitch, first.shape[0]) == (other.file, other.pitch, other.shape[0])
        and other.start + other.row_bytes <= first.start + pitch
    )


def _joined(chunks: Iterable[Piece | Made], most: int) -> Iterator[Run]:
    """Pieces in file order, those of up to `most` bytes together joined where their tensors can be used as they stand
    behind the first's first byte."""
    held: list[Piece | Made] = []
    start = end = 0
    file: Path | None = None  # of all that is held; None where nothing can be joined to it
    for chunk in chunks:
        parts = chunk.parts
        first, last = min(part.start for part in parts), max(part.start + part.span for part in parts)
        beside = start <= first <= end + GAP_BYTES and max(end, last) - start <= most
        if not (held and beside and _stand(parts, file, start)):
            if held:
                yield Run(tuple(held), start, end)
            held, start, end = [], first, first
            file = parts[0].file if _stand(parts, parts[0].file, start) else None
        held.append(chunk)
        end = max(end, last)
    if held:
        yield Run(tuple(held), start, end)


def _stand(parts: Iterable[Entry], file: Path | None, start: int) -> bool:
    """Whether they are in that file, and so far from `start` that their bytes can be taken for numbers."""
    return all(part.file == file and (part.start - start) % READ_ALIGNMENT == 0 for part in parts)
