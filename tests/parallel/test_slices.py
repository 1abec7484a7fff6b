"""What ranks take of a checkpoint's tensors: together all of it, each number once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.weights import runs, staging
from engine.weights.checkpoint import Checkpoint, Entry
from engine.weights.runs import Made, Piece
from engine.weights.transforms import RowScales

ROWS = 24
BORDERS = st.lists(st.integers(0, ROWS), min_size=2, max_size=8, unique=True).map(sorted)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Entry, torch.Tensor]:
    folder = tmp_path_factory.mktemp("stored")
    tensor = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)
    save_file({"w": tensor}, folder / "model.safetensors")
    return Checkpoint.open(folder).entries["w"], tensor


def read(entry: Entry) -> torch.Tensor:
    """As the loader copies it."""
    view = torch.full(entry.shape, -1.0)
    staging.copy([Piece(entry, view)])
    return view


@given(borders=BORDERS, data=st.data())
def test_runs_of_rows_stand_one_behind_the_other(
    stored: tuple[Entry, torch.Tensor], borders: list[int], data: st.DataObject
) -> None:
    entry, whole = stored
    runs = list(zip(borders[::2], borders[1::2], strict=False))
    kept, wanted = entry.runs(runs), torch.cat([whole[start:stop] for start, stop in runs])
    assert kept.shape == tuple(wanted.shape)
    assert kept.num_bytes == wanted.nbytes
    assert torch.equal(read(kept), wanted)
    assert sum(part.num_bytes for part in kept.parts) == kept.num_bytes


def test_large_runs_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BUFFER_BYTES", 64)
    tensor = torch.randn(40, 5)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    kept = Checkpoint.open(tmp_path).entries["w"].runs([(1, 14), (20, 22), (23, 40)])
    assert torch.equal(read(kept), torch.cat((tensor[1:14], tensor[20:22], tensor[23:])))


def test_what_is_made_of_runs_is_made_of_all_of_them(tmp_path: Path) -> None:
    """8-bit floats too, of which torch joins no others."""
    scales = torch.rand(9, 1).to(torch.float8_e4m3fn)
    save_file({"s": scales}, tmp_path / "model.safetensors")
    kept, view = Checkpoint.open(tmp_path).entries["s"].runs([(0, 2), (5, 9)]), torch.zeros(6, 1)
    staging.copy([Made((kept,), ((view,),), RowScales())])
    assert torch.equal(view, torch.cat((scales[:2].float(), scales[5:].float())))
