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


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece | Made]:
    """Of tensors anywhere in two files, one behind the other or not."""
    made: list[Piece | Made] = []
    for file in FILES:
        at = 0
        for number in range(draw(st.integers(0, 8))):
            at += draw(st.sampled_from([0, 0, 1, 16, 40]))
            shape = (draw(st.integers(0, 9)), draw(st.integers(1, 12)))
            dtype = draw(st.sampled_from([torch.uint8, torch.int16]))
            entry = Entry(f"{file}.{number}", file, at, dtype, shape)
            at += entry.num_bytes
            kind = draw(st.sampled_from(["piece", "wide", "rows", "columns", None]))
            if kind in ("piece", "wide"):
                made.append(Piece(entry, torch.zeros(shape, dtype=torch.int32 if kind == "wide" else dtype)))
                continue
            view = torch.zeros(shape[::-1] if kind == "columns" else shape, dtype=dtype)
            made.append(Made((entry,), ((view,),), Turned(kind)))
    return made


@given(pieces=pieces(), most=st.sampled_from([0, 32, 100, 1 << 20]), buffer=st.sampled_from([16, 64, 1 << 20]))
def test_what_runs_read_fills_all_that_was_asked_for(pieces: list[Piece | Made], most: int, buffer: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(runs.JOINED_BYTES, "cpu", most)
        patch.setattr(runs, "BUFFER_BYTES", buffer)
        planned = runs.runs(pieces, torch.device("cpu"))
    assert sum(run.num_bytes for run in planned) == sum(piece.num_bytes for piece in pieces)
    for run in planned:
        raw = run.target
        wanted = torch.zeros(run.size, dtype=torch.uint8) if raw is None else raw
        for read in run.reads:
            wanted[read.at :][: read.count] = BYTES[read.file][read.start :][: read.count]
        run.fill(wanted)
        if len(run.chunks) > 1:
            assert run.size <= most
    for piece in pieces:
        (entry,) = piece.entries
        (view,) = (piece.view,) if isinstance(piece, Piece) else piece.views[0]
        stored = BYTES[entry.file][entry.start :][: entry.num_bytes].clone().view(entry.dtype).view(entry.shape)
        turned = isinstance(piece, Made) and getattr(piece.transform, "cut", None) == "columns"
        assert torch.equal(view, (stored.t() if turned else stored).to(view.dtype))


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
