"""Bytes reach parameters as they are in the file: straight, in parts, or through a transform, on either way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.weights import runs, staging
from engine.weights.checkpoint import Checkpoint, Entry, Files, WeightsError
from engine.weights.rules import Shape
from engine.weights.runs import Made, Piece


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read."""
    counts: list[int] = []
    inner = Files.read_into

    def counted(files: Files, file: Path, start: int, buffer: memoryview) -> None:
        counts.append(len(buffer))
        inner(files, file, start, buffer)

    monkeypatch.setattr(Files, "read_into", counted)
    return counts


class Event:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces go the way of a GPU's, in memory of the host and without streams."""
    if torch.cuda.is_available():
        return
    for name in ("synchronize", "empty_cache", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: Event())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def of(size: int) -> Any:
        return SimpleNamespace(memory=torch.empty(size, dtype=torch.uint8), sent=Event())

    monkeypatch.setattr(staging._Pinned, "of", of)
    monkeypatch.setattr(staging, "_on_host", staging._to_device)
    monkeypatch.setitem(runs.JOINED_BYTES, "cpu", runs.BUFFER_BYTES)


def stored(folder: Path, tensor: torch.Tensor) -> Entry:
    save_file({"w": tensor}, folder / "model.safetensors")
    return Checkpoint.open(folder).entries["w"]


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("most", [64, 16 << 20])
def test_numbers_keep_their_bits(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, most: int
) -> None:
    monkeypatch.setattr(runs, "BUFFER_BYTES", most)
    tensor = numbers(24, 6, dtype)
    entry, whole = stored(tmp_path, tensor), torch.zeros(2, 24, 6, dtype=dtype, device=device)
    apart = torch.zeros(24, 2, 6, dtype=dtype, device=device)
    staging.copy([Piece(entry, whole[1]), Piece(entry, apart[:, 1])])
    for view in (whole[1], apart[:, 1]):
        assert torch.equal(view.cpu().view(torch.uint8), tensor.view(torch.uint8))
    for view in (whole[0], apart[:, 0]):
        assert not view.float().any()


def test_exponents_are_taken_as_bytes_and_others_as_numbers(tmp_path: Path, device: torch.device) -> None:
    exponents = torch.arange(100, 124, dtype=torch.uint8).view(4, 6)
    entry = stored(tmp_path, exponents.view(torch.float8_e8m0fnu))
    held, wide = (torch.zeros(4, 6, dtype=dtype, device=device) for dtype in (torch.uint8, torch.float32))
    staging.copy([Piece(entry.as_bytes(), held), Piece(entry, wide)])
    assert torch.equal(held.cpu(), exponents)
    assert torch.equal(wide.cpu(), torch.exp2(exponents.float() - 127))
    assert entry.columns(2, 5).as_bytes().shape == (4, 3)
    assert stored(tmp_path, numbers(4, 6)).columns(2, 5).as_bytes().shape == (4, 6)


@pytest.mark.parametrize("most", [70, 16 << 20])
def test_matrices_whose_rows_alternate_are_read_once(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, read: list[int], most: int
) -> None:
    monkeypatch.setattr(runs, "BUFFER_BYTES", most)
    tensor = numbers(12, 10)
    entry = stored(tmp_path, tensor)
    left, right = (torch.zeros(12, 5, dtype=torch.bfloat16, device=device) for _ in range(2))
    pieces = [Piece(entry.columns(5, 10), right), Piece(entry.columns(0, 5), left)]
    reports: list[tuple[int, int]] = []
    staging.copy(pieces, lambda *report: reports.append(report))
    assert torch.equal(left.cpu(), tensor[:, :5])
    assert torch.equal(right.cpu(), tensor[:, 5:])
    assert sum(read) == tensor.nbytes
    assert reports[-1] == (tensor.nbytes, tensor.nbytes)


@dataclass(frozen=True)
class Doubled:
    """Twice a matrix, turned where it is cut by columns, and the sum of each of its rows."""

    cut: str | None

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return True

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.cut == "columns":
            return 2 * tensors[0].t()
        if (tensors[0] < 0).any():
            raise WeightsError("it has a number below zero")
        return 2 * tensors[0], tensors[0].sum(dim=1, keepdim=True)


@pytest.mark.parametrize(("cut", "reads"), [("rows", 6), ("columns", 6), (None, 1)])
def test_what_may_be_cut_is_made_part_by_part(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, read: list[int], cut: str | None, reads: int
) -> None:
    monkeypatch.setattr(runs, "BUFFER_BYTES", 48)
    tensor = numbers(12, 6, torch.float32)
    entry = stored(tmp_path, tensor)
    made, sums = torch.zeros(tensor.t().shape if cut == "columns" else tensor.shape), torch.zeros(12, 1)
    made, sums = made.to(device), sums.to(device)
    views = ((made,),) if cut == "columns" else ((made,), (sums,))
    staging.copy([Made((entry,), views, Doubled(cut))])
    assert torch.equal(made.cpu(), 2 * tensor.t() if cut == "columns" else 2 * tensor)
    if cut != "columns":
        assert torch.equal(sums.cpu(), tensor.sum(dim=1, keepdim=True))
    if device.type == "cpu":
        assert len(read) == reads
    assert sum(read) == tensor.nbytes


def test_a_transform_that_refuses_names_the_source(tmp_path: Path, device: torch.device) -> None:
    entry = stored(tmp_path, -numbers(4, 6, torch.float32))
    views = ((torch.zeros(4, 6, device=device),), (torch.zeros(4, 1, device=device),))
    with pytest.raises(WeightsError, match=r"^w: it has a number below zero"):
        staging.copy([Made((entry,), views, Doubled("rows"))])


# Rows of the tensors.
PARTS = {"a": 4, "b": 1, "c": 1}


@pytest.fixture
def several(tmp_path: Path) -> dict[str, Entry]:
    """Twice three tensors beside each other in a file, of 96, 24 and 24 bytes."""
    whole = {f"{i}.{name}": numbers(rows, 6, torch.float32) + i for i in range(2) for name, rows in PARTS.items()}
    save_file(whole, tmp_path / "model.safetensors")
    return dict(Checkpoint.open(tmp_path).entries)


@pytest.mark.parametrize(("most", "reads"), [(0, 6), (120, 3), (300, 1)])
def test_small_pieces_beside_each_other_take_one_read(
    several: dict[str, Entry],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    read: list[int],
    most: int,
    reads: int,
) -> None:
    monkeypatch.setattr(runs, "READ_ALIGNMENT", 8)
    monkeypatch.setitem(runs.JOINED_BYTES, device.type, most)
    views = {name: torch.zeros(entry.shape, device=device) for name, entry in several.items()}
    sums = torch.zeros(4, 1, device=device)
    pieces: list[Piece | Made] = [Piece(several[name], views[name]) for name in views]
    pieces[0] = Made((several["0.a"],), ((views["0.a"],), (sums,)), Doubled("rows"))
    staging.copy(pieces)
    for i in range(2):
        for name, rows in PARTS.items():
            twice = 2 if (i, name) == (0, "a") else 1
            assert torch.equal(views[f"{i}.{name}"].cpu(), twice * (numbers(rows, 6, torch.float32) + i))
    assert torch.equal(sums.cpu(), numbers(4, 6, torch.float32).sum(dim=1, keepdim=True))
    assert len(read) == reads


def test_a_source_of_two_tensors_stands_in_a_read_with_both(
    several: dict[str, Entry], device: torch.device, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    """An order of inputs is a parameter of its own and stands beside the numbers that it moves."""
    monkeypatch.setattr(runs, "READ_ALIGNMENT", 8)
    monkeypatch.setitem(runs.JOINED_BYTES, device.type, 1 << 20)
    own, sums = torch.zeros(1, 6, device=device), torch.zeros(4, 1, device=device)
    whole = torch.zeros(4, 6, device=device)
    made = Made((several["0.a"], several["0.b"]), ((whole,), (sums,)), Doubled("rows"))
    staging.copy([made, Piece(several["0.b"], own)])
    assert torch.equal(own.cpu(), numbers(1, 6, torch.float32))
    assert torch.equal(whole.cpu(), 2 * numbers(4, 6, torch.float32))
    assert len(read) == 1


def test_numbers_that_would_stand_across_words_are_read_alone(
    several: dict[str, Entry], monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    monkeypatch.setitem(runs.JOINED_BYTES, "cpu", 1 << 20)
    staging.copy([Piece(entry, torch.zeros(entry.shape)) for entry in several.values()])
    assert sorted(read) == [24, 24, 120, 120]


def test_rows_of_heads_that_stand_in_pairs_are_put_apart(tmp_path: Path, device: torch.device) -> None:
    tensor = numbers(16, 6)
    entry, view = replace(stored(tmp_path, tensor), paired=8), torch.zeros(16, 6, dtype=torch.bfloat16, device=device)
    staging.copy([Piece(entry, view)])
    wanted = [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(view.cpu(), tensor[wanted + [8 + row for row in wanted]])


@pytest.mark.usefixtures("as_on_a_gpu")
class TestOnTheWayOfAGpu:
    def test_reads_that_take_several_buffers_come_together(
        self, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A source that cannot be cut is longer than a buffer."""
        monkeypatch.setattr(staging, "BUFFER_BYTES", 40)
        tensor = numbers(12, 6, torch.float32)
        entry, plain = stored(tmp_path, tensor), torch.zeros(12, 6, device=device)
        made, sums = torch.zeros(12, 6, device=device), torch.zeros(12, 1, device=device)
        reports: list[tuple[int, int]] = []
        pieces = [Made((entry,), ((made,), (sums,)), Doubled(None)), Piece(entry, plain)]
        staging.copy(pieces, lambda *report: reports.append(report))
        assert torch.equal(made.cpu(), 2 * tensor)
        assert torch.equal(plain.cpu(), tensor)
        assert reports[-1] == (2 * tensor.nbytes, 2 * tensor.nbytes)

    def test_many_runs_take_turns_with_few_buffers(
        self, several: dict[str, Entry], device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staging, "BUFFERS", 2)
        monkeypatch.setitem(runs.JOINED_BYTES, device.type, 0)
        views = [(name, torch.zeros(entry.shape, device=device)) for name, entry in several.items() for _ in range(40)]
        staging.copy([Piece(several[name], view) for name, view in views])
        for name, view in views:
            number, part = name.split(".")
            assert torch.equal(view.cpu(), numbers(PARTS[part], 6, torch.float32) + int(number))

    def test_what_holds_nothing_is_filled(self, tmp_path: Path, device: torch.device) -> None:
        entry, sums = stored(tmp_path, torch.zeros(0, 6)), torch.ones(0, 1, device=device)
        staging.copy([Made((entry,), ((torch.zeros(0, 6, device=device),), (sums,)), Doubled(None))])

    def test_a_transform_that_refuses_ends_the_reads(self, tmp_path: Path, device: torch.device) -> None:
        entry = stored(tmp_path, -numbers(400, 6, torch.float32))
        views = ((torch.zeros(400, 6, device=device),), (torch.zeros(400, 1, device=device),))
        with pytest.raises(WeightsError, match=r"^w: it has a number below zero"):
            staging.copy([Made((entry,), views, Doubled("rows"))] * 50)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]

    def test_a_read_that_fails_ends_the_load(
        self, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = stored(tmp_path, numbers(40, 6, torch.float32))

        def broken(files: Files, file: Path, start: int, buffer: memoryview) -> None:
            raise OSError("the disk is gone")

        monkeypatch.setattr(Files, "read_into", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            staging.copy([Piece(entry, torch.zeros(40, 6, device=device))] * 50)
