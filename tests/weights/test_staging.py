"""Bytes reach parameters as they are in the file: straight, in parts, or through a transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights import staging
from engine.weights.checkpoint import Checkpoint, Entry, Files, WeightsError
from engine.weights.rules import Shape


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
    monkeypatch.setattr(staging, "BUFFER_BYTES", most)
    tensor = numbers(24, 6, dtype)
    entry, whole = stored(tmp_path, tensor), torch.zeros(2, 24, 6, dtype=dtype, device=device)
    apart = torch.zeros(24, 2, 6, dtype=dtype, device=device)
    staging.copy([staging.Piece(entry, whole[1]), staging.Piece(entry, apart[:, 1])])
    for view in (whole[1], apart[:, 1]):
        assert torch.equal(view.cpu().view(torch.uint8), tensor.view(torch.uint8))
    for view in (whole[0], apart[:, 0]):
        assert not view.float().any()


def test_exponents_are_taken_as_bytes_and_others_as_numbers(tmp_path: Path, device: torch.device) -> None:
    exponents = torch.arange(100, 124, dtype=torch.uint8).view(4, 6)
    entry = stored(tmp_path, exponents.view(torch.float8_e8m0fnu))
    held, wide = (torch.zeros(4, 6, dtype=dtype, device=device) for dtype in (torch.uint8, torch.float32))
    staging.copy([staging.Piece(entry.as_bytes(), held), staging.Piece(entry, wide)])
    assert torch.equal(held.cpu(), exponents)
    assert torch.equal(wide.cpu(), torch.exp2(exponents.float() - 127))
    assert entry.columns(2, 5).as_bytes().shape == (4, 3)
    assert stored(tmp_path, numbers(4, 6)).columns(2, 5).as_bytes().shape == (4, 6)


@pytest.mark.parametrize("most", [70, 16 << 20])
def test_matrices_whose_rows_alternate_are_read_once(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, read: list[int], most: int
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", most)
    tensor = numbers(12, 10)
    entry = stored(tmp_path, tensor)
    left, right = (torch.zeros(12, 5, dtype=torch.bfloat16, device=device) for _ in range(2))
    pieces = [staging.Piece(entry.columns(5, 10), right), staging.Piece(entry.columns(0, 5), left)]
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
    monkeypatch.setattr(staging, "BUFFER_BYTES", 48)
    tensor = numbers(12, 6, torch.float32)
    entry = stored(tmp_path, tensor)
    made, sums = torch.zeros(tensor.t().shape if cut == "columns" else tensor.shape), torch.zeros(12, 1)
    made, sums = made.to(device), sums.to(device)
    views = ((made,),) if cut == "columns" else ((made,), (sums,))
    staging.copy([staging.Made((entry,), views, Doubled(cut))])
    assert torch.equal(made.cpu(), 2 * tensor.t() if cut == "columns" else 2 * tensor)
    if cut != "columns":
        assert torch.equal(sums.cpu(), tensor.sum(dim=1, keepdim=True))
    if device.type == "cpu":
        assert len(read) == reads
    assert sum(read) == tensor.nbytes


def test_columns_that_rows_do_not_fill_evenly_are_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", 8)
    entry = stored(tmp_path, numbers(12, 6, torch.float32))
    pieces = staging._chunks(staging.Made((entry,), ((torch.zeros(6, 5),),), Doubled("columns")))
    assert len(list(pieces)) == 1


def test_a_transform_that_refuses_names_the_source(tmp_path: Path, device: torch.device) -> None:
    entry = stored(tmp_path, -numbers(4, 6, torch.float32))
    views = ((torch.zeros(4, 6, device=device),), (torch.zeros(4, 1, device=device),))
    with pytest.raises(WeightsError, match=r"^w: it has a number below zero"):
        staging.copy([staging.Made((entry,), views, Doubled("rows"))])


def test_rows_of_heads_that_stand_in_pairs_are_put_apart(tmp_path: Path, device: torch.device) -> None:
    tensor = numbers(16, 6)
    entry, view = replace(stored(tmp_path, tensor), paired=8), torch.zeros(16, 6, dtype=torch.bfloat16, device=device)
    staging.copy([staging.Piece(entry, view)])
    wanted = [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(view.cpu(), tensor[wanted + [8 + row for row in wanted]])
