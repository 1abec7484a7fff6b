"""The Gluon product of many rows: how work is cut, and that it compiles for Hopper where there is no GPU to run it.

Its results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.linear.gated_persistent import INPUTS, OUTPUTS, REGISTERS, gated_persistent_kernel
from tests.compiled import box, for_hopper

constants = {"BN": OUTPUTS, "BK": INPUTS, "TEAMS": 2, "STAGES": 4, "BAND": 16, "ACT": "silu", "PDL": True}
kinds = {"x_desc": box(64, INPUTS), "w_desc": box(OUTPUTS, INPUTS), "y_desc": box(64, OUTPUTS)}
made = for_hopper(gated_persistent_kernel, constants, lambda name: kinds.get(name, "i32"), maxnreg=REGISTERS)
ptx = made.asm["ptx"]
assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 2 * 4, "two warpgroups, four products a slice"
assert "setmaxnreg" in ptx
print(made.metadata.shared)
"""

LAUNCH = """
from unittest import mock
import torch
import triton
from kernels.workspace import Workspace
from kernels.compilation.ahead import Compiler
from kernels.linear import gated_persistent, dense
from kernels.weight import Dense
from tests.kernels.compilation.driver import Driver

triton.runtime.driver.set_active(Driver())
compiled = []
triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
workspace = Workspace(torch.device("cpu"))
with (
    Compiler(1, None) as compiler,
    compiler.only(workspace),
    mock.patch.multiple(dense, group_products=lambda device: True, multiprocessors=lambda device: 132),
    mock.patch.object(gated_persistent, "multiprocessors", lambda device: 132),
):
    for rows in (2048, 2049, 2064, 3000):
        for n, k in ((144, 64), (128, 128), (136, 72)):
            w = Dense(torch.randn(2 * n, k).bfloat16())
            dense.linear(workspace, torch.randn(rows, k).bfloat16(), w, activation="silu")
print(compiled)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert 0 < int(run(COMPILE, tmp_path)) <= SHARED_BYTES


@pytest.mark.slow
def test_one_kernel_serves_all_sizes(tmp_path: Path) -> None:
    assert run(LAUNCH, tmp_path).strip() == "['gated_persistent_kernel']"


@settings(deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 120), band=st.integers(1, 32))
def test_every_tile_has_one_place(rows: int, columns: int, band: int) -> None:
    from kernels.hopper.schedule import banded

    places = {banded.fn(tile, rows, columns, band) for tile in range(rows * columns)}
    assert places == {(row, column) for row in range(rows) for column in range(columns)}


@pytest.mark.parametrize(("n", "k"), [(9728, 2560), (12288, 4096), (14336, 4096), (3072, 1024)])
def test_it_is_taken_where_it_fills_the_gpu(n: int, k: int) -> None:
    from kernels.linear.dispatch import gated_persistent_tile
    from kernels.linear.waves import filled

    assert gated_persistent_tile(256, n, k, 132) is None
    assert all(gated_persistent_tile(rows, n, k, 132) for rows in (2048, 2049, 8192))
    for rows in (512, 640, 1024, 1088, 1536, 2047):
        assert (gated_persistent_tile(rows, n, k, 132) is None) == (filled(rows, n, 132) < k / (k + 256))


@settings(deadline=None)
@given(rows=st.integers(1, 9000), outputs=st.integers(1, 20000))
def test_no_more_than_all_of_the_time_is_spent_on_outputs(rows: int, outputs: int) -> None:
    from kernels.linear.waves import filled

    assert 0 < filled(rows, outputs, 132) <= 1
