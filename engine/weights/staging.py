"""Brings tensors from files into parameters, on a few threads.

On a CPU what stands in a file as it stands in the parameter is read straight into it; everything else is read into a
buffer of the thread's and copied from there. On a GPU a thread has two pinned buffers: one is filled from disk while
the other is on its way to the device, on the thread's own stream, so that the disk, the bus and the other threads all
stay busy. What is made of tensors is made where the parameters are, of stored bytes in memory that the stream uses
again. Large sources are read and made part by part where that is the same; others of more than one buffer take turns,
so that threads together hold few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import torch

from engine.weights.checkpoint import Entry, Files, WeightsError
from engine.weights.rules import Shape, Transform

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

BUFFER_BYTES = 16 << 20
# What is made at once: on a CPU the numbers in between stay in its caches. On a GPU one launch makes a part.
MADE_BYTES = {"cpu": {"rows": 1 << 20, "columns": 4 << 20}, "cuda": {"rows": BUFFER_BYTES, "columns": BUFFER_BYTES}}
THREADS = {"cuda": 8, "cpu": 2}
# Of tensors that are in a buffer together.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One source and the part of a parameter that it fills. beside: others whose rows lie between its own."""

    entry: Entry
    view: torch.Tensor
    beside: tuple[Piece, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry, *(piece.entry for piece in self.beside))

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Made:
    """A source's tensors, and for each parameter that `transform` fills the consecutive rows that hold what it makes
    of them."""

    entries: tuple[Entry, ...]
    views: tuple[tuple[torch.Tensor, ...], ...]
    transform: Transform

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def shape(self) -> Shape:
        """Of all views of the first parameter together."""
        views = self.views[0]
        return (sum(len(view) for view in views), *views[0].shape[1:])


def copy(pieces: Sequence[Piece | Made], progress: Progress | None = None) -> None:
    """Read every piece's bytes into its view, in file order, on several threads."""
    if not pieces:
        return
    first = pieces[0]
    device = (first.views[0][0] if isinstance(first, Made) else first.view).device
    chunks = list(_together(sorted(chain.from_iterable(map(_chunks, pieces)), key=_place)))
    total, done, lock, large = sum(chunk.num_bytes for chunk in chunks), 0, Lock(), Lock()
    parts = [part for chunk in chunks for entry in chunk.entries for part in entry.parts]
    largest = min(BUFFER_BYTES, max(part.span for part in parts))
    work: SimpleQueue[Piece | Made] = SimpleQueue()
    for chunk in chunks:
        work.put(chunk)

    def drain(files: Files) -> None:
        nonlocal done
        staging = _Staging(files, device, largest)
        while True:
            try:
                chunk = work.get_nowait()
            except Empty:
                break
            with large if chunk.num_bytes > 2 * BUFFER_BYTES else nullcontext():
                staging.fill(chunk)
            with lock:
                done += chunk.num_bytes
                if progress is not None:
                    progress(done, total)
        staging.finish()

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # parameters are zeroed on another stream
    threads = min(THREADS.get(device.type, 1), len(chunks))
    with Files() as files, ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for file in {part.file for part in parts}:
            files.open(file)
        for future in [pool.submit(drain, files) for _ in range(threads)]:
            future.result()
    if device.type == "cuda":
        # What streams of threads held serves no other stream.
        torch.cuda.empty_cache()


def _place(piece: Piece | Made) -> tuple[Path, int]:
    entry = piece.entries[0]
    return entry.file, entry.start


def _chunks(piece: Piece | Made) -> Iterator[Piece | Made]:
    """Cut a piece along its first dimension into parts of about BUFFER_BYTES."""
    if isinstance(piece, Made):
        yield from _made_chunks(piece)
        return
    entry, view = piece.entry, piece.view
    if entry.joined:
        sizes = [part.shape[0] for part in entry.joined]
        for part, rows_of in zip(entry.joined, view.split(sizes), strict=True):
            yield from _chunks(Piece(part, rows_of))
        return
    if entry.span <= BUFFER_BYTES or view.dim() == 0:
        yield piece
        return
    rows, least = BUFFER_BYTES // (entry.pitch or entry.row_bytes), entry.paired or 1
    rows = max(least, rows // least * least)
    for at in range(0, entry.shape[0], rows):
        end = min(at + rows, entry.shape[0])
        yield Piece(entry.rows(at, end), view[at:end])


def _made_chunks(piece: Made) -> Iterator[Made]:
    """Cut what is made as its transform allows it."""
    cut: str | None = getattr(piece.transform, "cut", None)
    made_bytes = MADE_BYTES[piece.views[0][0].device.type]
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


class _Staging:
    """A thread's buffers, and what it does with a piece."""

    def __init__(self, files: Files, device: torch.device, largest: int) -> None:
        self._files = files
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._turn = 0
        if self._cuda:
            size = max(largest, 1)
            self._pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._stream = torch.cuda.Stream(device)
            self._sent = [torch.cuda.Event() for _ in self._pinned]

    def fill(self, chunk: Piece | Made) -> None:
        """Raises WeightsError where a transform does, with the source's name."""
        on_stream: Any = torch.cuda.stream(self._stream) if self._cuda else nullcontext()
        with torch.no_grad(), on_stream:
            if isinstance(chunk, Made):
                self._make(chunk)
            elif not chunk.beside and _same_bytes(chunk.entry, chunk.view):
                self._read(chunk.entry.file, chunk.entry.start, chunk.view.reshape(-1).view(torch.uint8))
            else:
                start = chunk.entry.start
                end = max(entry.start + entry.span for entry in chunk.entries)
                (raw,) = self._raw([(chunk.entry.file, start, end - start)])
                for piece in (chunk, *chunk.beside):
                    at = piece.entry.start - start
                    piece.entry.copy(raw[at : at + piece.entry.span], piece.view)

    def _make(self, chunk: Made) -> None:
        parts = [part for entry in chunk.entries for part in entry.parts]
        raw = iter(self._raw([(part.file, part.start, part.span) for part in parts]))
        tensors = []
        for entry in chunk.entries:
            held = [part.tensor(next(raw)) for part in entry.parts]
            tensors.append(held[0] if len(held) == 1 else torch.cat(held))
        try:
            made = chunk.transform(tensors, chunk.shape)
        except WeightsError as error:
            raise WeightsError(f"{chunk.entries[0].name}: {error}") from None
        for views, whole in zip(chunk.views, made if isinstance(made, tuple) else (made,), strict=True):
            for view, part in zip(views, whole.split([len(view) for view in views]), strict=True):
                view.copy_(part)

    def _raw(self, spans: Sequence[tuple[Path, int, int]]) -> list[torch.Tensor]:
        """The bytes [start, start + count) of each (file, start, count), on the device until the next call."""
        places, size = [], 0
        for *_, count in spans:
            places.append(size)
            size += count + -count % ALIGNMENT
        if self._cuda:
            # The one before may still be read: its memory goes to what comes behind that in the stream.
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        else:
            if len(self._buffer) < size:
                self._buffer = torch.empty(size, dtype=torch.uint8)
            buffer = self._buffer
        made = [buffer[at : at + count] for at, (*_, count) in zip(places, spans, strict=True)]
        for (file, start, _), raw in zip(spans, made, strict=True):
            self._read(file, start, raw)
        return made

    def _read(self, file: Path, start: int, target: torch.Tensor) -> None:
        """Fill `target`, bytes, with those of the file from `start` on."""
        if target.device.type == "cpu":
            self._files.read_into(file, start, target.numpy().data)
            return
        for at in range(0, len(target), len(self._pinned[0])):
            part = target[at : at + len(self._pinned[0])]
            turn, self._turn = self._turn, 1 - self._turn
            self._sent[turn].synchronize()
            raw = self._pinned[turn][: len(part)]
            self._files.read_into(file, start + at, raw.numpy().data)
            part.copy_(raw, non_blocking=True)
            self._sent[turn].record(self._stream)

    def finish(self) -> None:
        if self._cuda:
            self._stream.synchronize()


def _same_bytes(entry: Entry, view: torch.Tensor) -> bool:
    return entry.is_plain and entry.dtype == view.dtype and view.is_contiguous()
