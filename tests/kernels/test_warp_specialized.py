"""The Gluon product with a warp that feeds: that it compiles for Hopper, and which sizes it is for.

How work is cut is tested in test_stream.py; results are held by the cases of `linear` on a GPU (test_ops.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.linear.warp_specialized import INPUTS, OUTPUTS, REGISTERS, ROWS, warp_specialized_kernel
from kernels.linear.dispatch import warp_specialized_tile
from tests.compiled import box, for_hopper

for n, k, act in ((2048, 2048, None), (2048, 4096, None), (14336, 4096, "silu")):
    tile = warp_specialized_tile(64, n, k, act is not None, 132)
    constants = {
        "BM": ROWS, "BN": OUTPUTS, "BK": INPUTS, "STAGES": tile.stages, "X_STAGES": tile.x_stages, "AT_ONCE": 4,
        "SHARED": tile.split > 1, "ACT": act, "BIAS": True, "RESIDUAL": act is None, "PDL": True,
    }
    if act is not None:
        constants["residual_ptr"] = None
    kinds = {"x_desc": box(ROWS, INPUTS), "w_desc": box(OUTPUTS, INPUTS), "partial_ptr": "*fp32", "count_ptr": "*i32"}
    made = for_hopper(
        warp_specialized_kernel, constants, lambda name: kinds.get(name, "*bf16" if name.endswith("ptr") else "i32"),
        maxnreg=REGISTERS,
    )
    ptx = made.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{ROWS}k16" in ptx
    feed = ptx[: ptx.index("cp.async.bulk.tensor")].rindex("barrier.sync")
    waits = [at for at in range(feed, len(ptx)) if ptx.startswith("griddepcontrol.wait", at)]
    assert ptx.count("cp.async.bulk.tensor", feed, waits[0]) > tile.stages, "weights are asked for before the wait"
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper_and_asks_for_weights_before_it_waits(tmp_path: Path) -> None:
    small, partials, gated = map(int, run(COMPILE, tmp_path).split())
    assert max(small, partials) <= SHARED_BYTES
    assert 2 * (gated + 1024) <= SHARED_BYTES + 1024, "two programs of gate and up share a multiprocessor"


@pytest.mark.parametrize("rows", [33, 64])
def test_takes_the_sizes_that_were_measured(rows: int) -> None:
    from kernels.linear.dispatch import warp_specialized_tile

    def split(n: int, k: int, activation: bool = False) -> int | None:
        tile = warp_specialized_tile(rows, n, k, activation, 132)
        return None if tile is None else tile.split

    assert split(3648, 2048) == split(2048, 2048) == 1
    assert split(2048, 4096) == 4
    assert split(14336, 4096, activation=True) == 1
    assert split(5120, 2048) is None
    assert split(6144, 4096) is None
    assert split(2560, 4096) is None
    assert split(102400, 2048) is None


@pytest.mark.parametrize("rows", [2, 32])
def test_leaves_few_rows_alone(rows: int) -> None:
    from kernels.linear.dispatch import warp_specialized_tile

    assert warp_specialized_tile(rows, 2048, 2048, False, 132) is None
