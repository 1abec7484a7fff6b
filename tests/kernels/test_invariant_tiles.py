"""Batch-invariant products on Hopper: of one weight, tiles for any number of rows add the same partials in one order.

Bits are compared on a GPU by `test_batch_invariant`: Gluon has no interpreter.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import SHARED_BYTES

ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 1000, 1024, 8192)
SIZES = ((6144, 2560), (2560, 9728), (4096, 14336), (96, 264), (151936, 2560), (17000, 264), (2632, 1544))


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("gated", [False, True])
def test_splits_and_their_slices_follow_from_the_weight_alone(n: int, k: int, gated: bool) -> None:
    from kernels.linear.invariant import few_rows_tile, many_rows_tile, splits
    from kernels.linear.persistent import UNIT

    few = [few_rows_tile(rows, n, k, gated, 132) for rows in ROWS if rows <= 128]
    assert {1 if tile.whole else tile.split for tile in few} == {splits(n, k, gated, 132)}
    assert {tile.inputs for tile in few} == {UNIT}
    if not gated:
        assert {many_rows_tile(rows, n, k, 132).splits for rows in ROWS} == {splits(n, k, gated, 132)}


@pytest.mark.parametrize(
    ("n", "k", "heights"),
    [
        (6144, 2560, {129: 128, 256: 128, 1024: 128, 8192: 192}),
        (2560, 9728, {129: 128, 256: 128, 512: 128, 1024: 192, 8192: 128}),
        (4096, 14336, {129: 128, 256: 128, 1024: 128, 8192: 192}),
    ],
    ids=["q, k, v of Qwen3-4B", "down of Qwen3-4B", "down of Llama-3.1-8B"],
)
def test_many_rows_take_the_tile_that_was_faster(n: int, k: int, heights: dict[int, int]) -> None:
    """docs/experiments/2026-11-24-batch-invariant-products.md"""
    from kernels.linear.invariant import many_rows_tile

    assert {rows: 64 * many_rows_tile(rows, n, k, 132).teams for rows in heights} == heights


@settings(deadline=None)
@given(tiles=st.integers(1, 300), slices=st.integers(4, 200), splits=st.integers(1, 4), data=st.data())
def test_programs_that_share_a_tile_take_its_splits(tiles: int, slices: int, splits: int, data: st.DataObject) -> None:
    from kernels.hopper.schedule import first_unit

    tile, split = data.draw(st.integers(0, tiles - 1)), data.draw(st.integers(0, splits))
    shared = first_unit.fn(tile * splits + split, tiles * slices, tiles * splits) - tile * slices
    assert shared == first_unit.fn(split, slices, splits)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows <= 128])
def test_streamed_tiles_fit_a_multiprocessor(rows: int, n: int, k: int, gated: bool) -> None:
    from kernels.linear.invariant import few_rows_tile

    tile = few_rows_tile(rows, n, k, gated, 132)
    held = tile.stages * (tile.outputs * (2 if gated else 1) + tile.rows) * tile.inputs * 2
    assert rows <= tile.rows
    assert tile.stages >= 2
    # the ring, and a tile of results that changes its layout
    assert held + tile.outputs * tile.rows * 4 <= SHARED_BYTES - 1024


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_what_x_looks_like_decides_nothing(rows: int, bias: bool) -> None:
    """A view whose rows the copy engine cannot read is copied; of a weight that it cannot read it has no part."""
    from kernels.linear import dense
    from kernels.weight import Dense
    from kernels.workspace import Workspace

    asked: list[Any] = []

    def note(problem: Any) -> Any:
        asked.append(problem)
        return mock.Mock(launch=lambda operands, _: operands.x)

    workspace = Workspace(torch.device("cpu"))
    wide = torch.zeros(rows, 72, dtype=torch.bfloat16)
    with (
        mock.patch.object(dense, "group_products", return_value=True),
        mock.patch.object(dense.DISPATCH, "choose", note),
    ):
        for n, x in ((96, wide[:, :64]), (96, wide[:, 1:65]), (95, wide[:, :64])):
            given = torch.zeros(n, dtype=torch.bfloat16) if bias else None
            used = dense.linear(workspace, x, Dense(torch.zeros(n, 64).bfloat16()), given, deterministic=True)
            assert used.data_ptr() % 16 == 0
    assert [problem.copies for problem in asked] == [True, True, False]
