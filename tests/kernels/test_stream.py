"""The Gluon product of few rows: how work is cut, and that it compiles for Hopper where there is no GPU to run it.

Its results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.linear.stream import stream_kernel
from tests.compiled import box, for_hopper

for rows, outputs, act in ((8, 64, None), (64, 64, "silu"), (128, 64, "silu")):
    constants = {
        "BM": rows, "BN": outputs, "BK": 64, "STAGES": 4, "SHARED": True, "WHOLE": False, "ACT": act,
        "BIAS": False, "RESIDUAL": act is None, "PDL": True, "bias_ptr": None,
    }
    if act is not None:
        constants["residual_ptr"] = None
    kinds = {"x_desc": box(rows, 64), "w_desc": box(outputs, 64), "partial_ptr": "*fp32", "count_ptr": "*i32"}
    made = for_hopper(
        stream_kernel, constants, lambda name: kinds.get(name, "*bf16" if name.endswith("ptr") else "i32")
    )
    ptx = made.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16" in ptx
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait"), "weights are asked for before the wait"
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper_and_asks_for_weights_before_it_waits(tmp_path: Path) -> None:
    assert all(0 < int(size) < SHARED_BYTES for size in run(COMPILE, tmp_path).split())


@settings(deadline=None, max_examples=60)
@given(tiles=st.integers(1, 300), slices=st.integers(1, 80), programs=st.integers(1, 600))
def test_every_unit_has_one_program_and_every_partial_a_place(tiles: int, slices: int, programs: int) -> None:
    from kernels.hopper.schedule import first_unit, unit_owner

    first, owner = first_unit.fn, unit_owner.fn
    units = tiles * slices
    programs = min(programs, units)
    ranges = [(first(p, units, programs), first(p + 1, units, programs)) for p in range(programs)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == units
    assert all(a < b for a, b in ranges)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    sharers: dict[int, list[tuple[int, int]]] = {}
    for program, (start, stop) in enumerate(ranges):
        assert owner(start, units, programs) == owner(stop - 1, units, programs) == program
        for tile in range(start // slices, -(-stop // slices)):
            begin, end = max(start, tile * slices), min(stop, (tile + 1) * slices)
            if end - begin < slices:
                sharers.setdefault(tile, []).append((program, 2 * program + (begin == tile * slices)))
    places = [place for partials in sharers.values() for _, place in partials]
    assert len(places) == len(set(places))
    for tile, partials in sharers.items():
        one, other = owner(tile * slices, units, programs), owner((tile + 1) * slices - 1, units, programs)
        assert [program for program, _ in partials] == list(range(one, other + 1))
        # where the last program to arrive looks for each part
        assert [place for _, place in partials] == [
            2 * p + (first(p, units, programs) <= tile * slices) for p in range(one, other + 1)
        ]


@pytest.mark.parametrize("rows", [2, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("n", [40, 576, 2560, 4096, 6144, 14336, 151936])
@pytest.mark.parametrize("k", [64, 2560, 4096, 14336])
def test_tuned_tiles_fit_a_multiprocessor(rows: int, n: int, k: int) -> None:
    from kernels.linear.dispatch import stream_tile

    for activation in (False, True):
        tile = stream_tile(rows, n, k, activation, multiprocessors=132)
        weights = tile.outputs * (2 if activation else 1)
        # the ring, and a tile of results that changes its layout
        held = tile.stages * (weights + tile.rows) * tile.inputs * 2 + tile.outputs * tile.rows * 4
        assert rows <= tile.rows
        assert held <= 232448 - 1024
        assert tile.outputs % (16 * tile.warps) == 0
