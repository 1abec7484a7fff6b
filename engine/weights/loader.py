"""Fills a model's parameters from a checkpoint by rules, and checks both sides: every parameter filled exactly once,
every tensor used or known to be unused.

Bytes go file → staging buffer → parameter. A few threads each own two buffers; on a GPU these are pinned and the
copies run on the thread's own stream, so that the disk, the bus and the other threads all stay busy. What a rule
transforms is read source by source, and what is made of it copied: a thread holds no more than one source's tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from types import MappingProxyType

import torch

from engine.weights.checkpoint import Checkpoint, Entry, Files, WeightsError, listed
from engine.weights.rules import Rule, Shape, Transform

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
INTS = frozenset({torch.int64, torch.int32})
# Powers of two, which any float holds.
EXPONENTS = frozenset({torch.float8_e8m0fnu, torch.float32})
BUFFER_BYTES = 16 << 20
THREADS = {"cuda": 8, "cpu": 2}

# Tensors that some checkpoints hold although they can be computed from the config.
DERIVED = ("*.rotary_emb.inv_freq", "rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias")


@dataclass(frozen=True, slots=True)
class Piece:
    """One source and the part of a parameter that it fills."""

    entry: Entry
    view: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes


@dataclass(frozen=True, slots=True)
class Made:
    """A source's tensors, and the consecutive rows of parameters that hold what `transform` makes of them."""

    entries: tuple[Entry, ...]
    views: tuple[torch.Tensor, ...]
    transform: Transform

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def shape(self) -> Shape:
        """Of all views together."""
        return (sum(len(view) for view in self.views), *self.views[0].shape[1:])


def load(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    unused: Iterable[str] = (),
    copies: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | None = None,
    bounds: Mapping[str, int] = MappingProxyType({}),
    zeros: Iterable[str] = (),
) -> None:
    """Fill `parameters` in place. `unused` are name patterns of tensors that this model does not need, and `copies`
    names of tensors that may be there if they equal another, whose name stands behind. `bounds` names parameters that
    hold ids, which are below the number behind, and `zeros` tensors that may be there if they hold nothing else.

    Raises WeightsError that names every missing, extra, misshapen and wrong-dtype tensor; parameters are then
    untouched, since everything is checked before the first byte is read.
    """
    with torch.no_grad():
        zeros = tuple(zeros)
        pieces = plan(parameters, checkpoint, rules, unused, (*copies, *zeros))
        for name, other in copies.items():
            if name in checkpoint.entries and not equal(checkpoint.entries[name], checkpoint.entries[other]):
                raise WeightsError(
                    f"config.json says that {name} is {other} (tie_word_embeddings), and the checkpoint holds another "
                    "tensor there: set tie_word_embeddings to false, or remove the tensor"
                )
        for name in zeros:
            if not _all_zero(checkpoint.entries[name]):
                raise WeightsError(f"{name} is not zero, and this model has no such bias: its architecture is another")
        copy(pieces, progress)
        for name, below in bounds.items():
            if not bool(((parameters[name] >= 0) & (parameters[name] < below)).all()):
                raise WeightsError(f"the tensor of {name} holds ids outside of 0 to {below - 1}")


def dtypes(checkpoint: Checkpoint, rules: Sequence[Rule], ending: str) -> set[torch.dtype]:
    """Those of the tensors that fill parameters whose names end so."""
    names = {name for rule in rules if rule.target.endswith(ending) for name in rule.sources}
    return {checkpoint.entries[name].dtype for name in names & checkpoint.entries.keys()}


def plan(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    unused: Iterable[str] = (),
    copies: Iterable[str] = (),
) -> list[Piece | Made]:
    """Match rules with both sides, which needs no memory behind `parameters`. Raises WeightsError with all that is
    wrong."""
    entries = checkpoint.entries
    pieces: list[Piece | Made] = []
    wrong: list[str] = []
    lacking: list[str] = []
    patterns = (*DERIVED, *unused, *copies)
    targets: set[str] = set()
    sources: set[str] = set()
    for rule in rules:
        if rule.target in targets:
            raise WeightsError(f"two rules fill the parameter {rule.target}")
        if rule.target not in parameters:
            raise WeightsError(f"a rule fills {rule.target}, which the model does not have")
        targets.add(rule.target)
        named = [*rule.sources, *(name for beside in rule.beside for name in beside)]
        sources.update(named)
        missing = [name for name in named if name not in entries]
        if missing:
            lacking += missing
            continue
        made, problems = _made(rule, parameters[rule.target], entries)
        pieces += made
        wrong += problems
    unfilled = sorted(set(parameters) - targets)
    if unfilled:
        raise WeightsError(f"no rule fills the parameters {listed(unfilled)}")
    if lacking:
        wrong.append(f"missing: {listed(list(dict.fromkeys(lacking)))}")
    extra = sorted(
        name for name in set(entries) - sources if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )
    if extra:
        wrong.append(f"not part of this model: {listed(extra)}")
    if wrong:
        raise WeightsError("the checkpoint's tensors do not fit its config.json; " + listed(wrong, separator="; "))
    return pieces


def _made(rule: Rule, target: torch.Tensor, entries: Mapping[str, Entry]) -> tuple[Sequence[Piece | Made], list[str]]:
    sources = [entries[name] for name in rule.sources]
    views = rule.combine(target, [entry.shape for entry in sources])
    if rule.transform is None:
        return _pieces(sources, views)
    made, wrong = [], []
    for entry, view, beside in zip(sources, views, rule.beside or ((),) * len(sources), strict=True):
        parts = (view,) if isinstance(view, torch.Tensor) else tuple(view)
        one = Made((entry, *(entries[name] for name in beside)), parts, rule.transform)
        made.append(one)
        if not rule.transform.fits([e.shape for e in one.entries], one.shape):
            wrong.append(f"misshapen: {', '.join(map(_shaped, one.entries))}, needed for {list(one.shape)}")
    return made, wrong


def _pieces(
    entries: Sequence[Entry], views: Sequence[torch.Tensor | list[torch.Tensor]]
) -> tuple[list[Piece], list[str]]:
    pieces, wrong = [], []
    for entry, view in _parts(entries, views):
        if tuple(view.shape) != entry.shape:
            wrong.append(f"misshapen: {_shaped(entry)}, needed {list(view.shape)}")
        elif entry.dtype != view.dtype and not any(
            {entry.dtype, view.dtype} <= kinds for kinds in (FLOATS, INTS, EXPONENTS)
        ):
            found, needed = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, view.dtype))
            wrong.append(
                f"wrong dtype: {entry.name} is {found}, needed {needed}, and config.json does not "
                "say how it is quantized"
            )
        else:
            pieces.append(Piece(entry, view))
    return pieces, wrong


def _parts(
    entries: Sequence[Entry], views: Sequence[torch.Tensor | list[torch.Tensor]]
) -> Iterable[tuple[Entry, torch.Tensor]]:
    """Each source with its view; one that is given several is cut into as many runs of rows, and one whose view has a
    dimension more has its rows cut."""
    for entry, view in zip(entries, views, strict=True):
        if isinstance(view, torch.Tensor):
            if view.dim() == 3 and len(entry.shape) == 2:
                rows = (len(view), view.shape[1] * view.shape[2])
                if entry.shape == rows:
                    entry = replace(entry, shape=tuple(view.shape))
                else:
                    view = torch.empty(rows, dtype=view.dtype, device="meta")  # for the message
            yield entry, view
        elif (needed := (sum(len(part) for part in view), *view[0].shape[1:])) != entry.shape:
            yield entry, torch.empty(needed, dtype=view[0].dtype, device="meta")
        else:
            start = 0
            for part in view:
                yield entry.rows(start, start + len(part)), part
                start += len(part)


def _shaped(entry: Entry) -> str:
    return f"{entry.name} {list(entry.shape)}"


def equal(one: Entry, other: Entry) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    buffers = bytearray(BUFFER_BYTES), bytearray(BUFFER_BYTES)
    with Files() as files:
        for at in range(0, one.num_bytes, BUFFER_BYTES):
            size = min(BUFFER_BYTES, one.num_bytes - at)
            for entry, buffer in zip((one, other), buffers, strict=True):
                files.open(entry.file)
                files.read_into(entry.file, entry.start + at, memoryview(buffer)[:size])
            if buffers[0][:size] != buffers[1][:size]:
                return False
    return True


def _all_zero(entry: Entry) -> bool:
    raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
    with Files() as files:
        files.open(entry.file)
        files.read_into(entry.file, entry.start, raw.numpy().data)
    return not bool(raw.view(entry.dtype).any())


def copy(pieces: Sequence[Piece | Made], progress: Progress | None = None) -> None:
    """Read every piece's bytes into its view, in file order, on several threads."""
    if not pieces:
        return
    chunks = [chunk for piece in sorted(pieces, key=_place) for chunk in _chunks(piece)]
    first = pieces[0]
    device = (first.views[0] if isinstance(first, Made) else first.view).device
    largest = max((chunk.entry.span for chunk in chunks if isinstance(chunk, Piece)), default=0)
    total, done, lock = sum(chunk.num_bytes for chunk in chunks), 0, Lock()
    work: SimpleQueue[Piece | Made] = SimpleQueue()
    for chunk in chunks:
        work.put(chunk)

    def drain(files: Files) -> None:
        nonlocal done
        staging = _Staging(largest, device)
        while True:
            try:
                chunk = work.get_nowait()
            except Empty:
                break
            if isinstance(chunk, Made):
                staging.make(files, chunk)
            else:
                staging.copy(files, chunk)
            with lock:
                done += chunk.num_bytes
                if progress is not None:
                    progress(done, total)
        staging.finish()

    threads = min(THREADS.get(device.type, 1), len(chunks))
    with Files() as files, ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for chunk in chunks:
            for entry in _entries(chunk):
                files.open(entry.file)
        for future in [pool.submit(drain, files) for _ in range(threads)]:
            future.result()


def _entries(piece: Piece | Made) -> tuple[Entry, ...]:
    return piece.entries if isinstance(piece, Made) else (piece.entry,)


def _place(piece: Piece | Made) -> tuple[Path, int]:
    entry = _entries(piece)[0]
    return entry.file, entry.start


def _chunks(piece: Piece | Made) -> Iterable[Piece | Made]:
    """Cut a piece along its first dimension into parts of about BUFFER_BYTES."""
    if isinstance(piece, Made):
        yield piece
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


class _Staging:
    """A thread's two buffers: one is filled from disk while the other is on its way to the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        size = max(num_bytes, 1)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(1 + self._cuda)]
        self._turn = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._sent = [torch.cuda.Event() for _ in self._buffers]

    def copy(self, files: Files, chunk: Piece) -> None:
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        if self._cuda:
            self._sent[turn].synchronize()
        entry = chunk.entry
        raw = self._buffers[turn][: entry.span]
        files.read_into(entry.file, entry.start, raw.numpy().data)
        tensor = entry.tensor(raw)
        if self._cuda:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                chunk.view.copy_(tensor, non_blocking=True)
                self._sent[turn].record(self._stream)
        else:
            with torch.no_grad():
                chunk.view.copy_(tensor)

    def make(self, files: Files, piece: Made) -> None:
        """Through pageable memory: what is made has another size than what was read."""
        tensors = []
        for entry in piece.entries:
            parts = []
            for part in entry.parts:
                raw = torch.empty(part.span, dtype=torch.uint8)
                files.read_into(part.file, part.start, raw.numpy().data)
                parts.append(part.tensor(raw))
            tensors.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        with torch.no_grad():
            try:
                made = piece.transform(tensors, piece.shape)
            except WeightsError as error:
                raise WeightsError(f"{piece.entries[0].name}: {error}") from None
            for view, part in zip(piece.views, made.split([len(view) for view in piece.views]), strict=True):
                view.copy_(part)

    def finish(self) -> None:
        if self._cuda:
            self._stream.synchronize()
