"""Pieces are cut and joined so that each byte is read where it is wanted, and each parameter is filled whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import runs
from engine.weights.checkpoint import Entry
from engine.weights.rules import Shape
from engine.weights.runs import Made, Piece, Read

FILES = [Path("one"), Path("two")]
BYTES = {
    file: torch.randint(0, 256, (1 << 12,), generator=torch.Generator().manual_seed(i)).to(torch.uint8)
    for i, file in enumerate(FILES)
}


class Turned:
    """The matrix as it is, or turned where it is cut by columns."""

    def __init__(self, cut: str | None) -> None:
        self.cut = cut

    def fits(self, shapes: list[Shape], view: Shape) -> bool:
        return True

    def __call__(self, tensors: list[torch.Tensor], view: Shape) -> torch.Tensor:
        return tensors[0].t() if self.cut == "columns" else tensors[0]


# A piece, and the numbers that it is to be filled with.
Wanted = tuple[Piece | Made, torch.Tensor]


@st.composite
def pieces(draw: st.DrawFn) -> list[Wanted]:
    """Of tensors anywhere in two files, one behind the other or not; of some, two runs of columns."""
    made: list[Wanted] = []
    for file in FILES:
        at = 0
        for number in range(draw(st.integers(0, 8))):
            at += draw(st.sampled_from([0, 0, 1, 16, 40]))
            shape = (draw(st.integers(0, 9)), draw(st.integers(1, 12)))
            dtype = draw(st.sampled_from([torch.uint8, torch.int16]))
            entry = Entry(f"{file}.{number}", file, at, dtype, shape)
            stored = BYTES[file][at:][: entry.num_bytes].clone().view(dtype).view(shape)
            at += entry.num_bytes
            if draw(st.booleans()):
                one, two, three = sorted(draw(st.integers(0, shape[1])) for _ in range(3))
                kept = [(one, two), (three, shape[1])]
                entry = entry.column_runs(kept)
                stored = torch.cat([stored[:, start:stop] for start, stop in kept], dim=1)
            kind = draw(st.sampled_from(["piece", "wide", "rows", "columns", None]))
            wanted = stored.t() if kind == "columns" else stored
            view = torch.zeros(wanted.shape, dtype=torch.int32 if kind == "wide" else dtype)
            piece = Piece(entry, view) if kind in ("piece", "wide") else Made((entry,), ((view,),), Turned(kind))
            made.append((piece, wanted))
    return made


@given(wanted=pieces(), most=st.sampled_from([0, 32, 100, 1 << 20]), buffer=st.sampled_from([16, 64, 1 << 20]))
def test_what_runs_read_fills_all_that_was_asked_for(wanted: list[Wanted], most: int, buffer: int) -> None:
    pieces = [piece for piece, _ in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(runs.JOINED_BYTES, "cpu", most)
        patch.setattr(runs, "BUFFER_BYTES", buffer)
        planned = runs.runs(pieces, torch.device("cpu"))
    assert sum(run.num_bytes for run in planned) == sum(piece.num_bytes for piece in pieces)
    for run in planned:
        raw = run.target
        held = torch.zeros(run.size, dtype=torch.uint8) if raw is None else raw
        for read in run.reads:
            held[read.at :][: read.count] = BYTES[read.file][read.start :][: read.count]
        run.fill(held)
        if len(run.chunks) > 1:
            assert run.size <= most
    for piece, numbers in wanted:
        (view,) = (piece.view,) if isinstance(piece, Piece) else piece.views[0]
        assert torch.equal(view, numbers.to(view.dtype))


def test_gaps_that_would_be_read_for_nothing_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runs.JOINED_BYTES, "cpu", 1 << 20)
    near, far = (Entry("w", FILES[0], 16 + gap, torch.uint8, (16,)) for gap in (runs.GAP_BYTES, runs.GAP_BYTES + 16))
    first = Entry("v", FILES[0], 0, torch.uint8, (16,))
    for other, count in ((near, 1), (far, 2)):
        both = [Piece(entry, torch.zeros(16, dtype=torch.uint8)) for entry in (first, other)]
        assert len(runs.runs(both, torch.device("cpu"))) == count


def test_a_read_is_split_to_buffers() -> None:
    whole = Read(FILES[0], 100, 25, 64)
    assert list(whole.split(10)) == [
        Read(FILES[0], 100, 10, 64),
        Read(FILES[0], 110, 10, 74),
        Read(FILES[0], 120, 5, 84),
    ]
    assert list(Read(FILES[0], 7, 0, 0).split(10)) == [Read(FILES[0], 7, 0, 0)]


def test_columns_that_rows_do_not_fill_evenly_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BUFFER_BYTES", 8)
    entry = Entry("w", FILES[0], 0, torch.float32, (12, 6))
    made = Made((entry,), ((torch.zeros(6, 5),),), Turned("columns"))
    assert len(runs.runs([made], torch.device("cpu"))) == 1
