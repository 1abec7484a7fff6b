"""The Gluon product that leaves its parts to a norm: that it compiles for Hopper, which sizes it is for, and the sum.

Its results are held by the cases of `linear_norm` on a GPU (test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.linear.reference import linear
from kernels.rms_norm.reference import rms_norm
from kernels.testing import TOLERANCES, assert_close, randn, seeded, workspace
from kernels.weight import Dense
from kernels.workspace import Workspace
from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.linear.warp_specialized import INPUTS, OUTPUTS, REGISTERS, ROWS
from kernels.linear.split_k import split_k_kernel, split_k_tile
from tests.compiled import box, for_hopper

for k in (2048, 4096):
    tile = split_k_tile(64, 2048, k, 132)
    constants = {
        "BM": ROWS, "BN": OUTPUTS, "BK": INPUTS, "STAGES": tile.stages, "X_STAGES": tile.x_stages,
        "SPLIT": tile.split, "PDL": True,
    }
    kinds = {"x_desc": box(ROWS, INPUTS), "w_desc": box(OUTPUTS, INPUTS), "partial_ptr": "*fp32"}
    made = for_hopper(split_k_kernel, constants, lambda name: kinds.get(name, "i32"), maxnreg=REGISTERS)
    ptx = made.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{ROWS}k16" in ptx
    feed = ptx[: ptx.index("cp.async.bulk.tensor")].rindex("barrier.sync")
    wait = ptx.index("griddepcontrol.wait", feed)
    assert ptx.count("cp.async.bulk.tensor", feed, wait) > tile.stages, "weights are asked for before the wait"
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper_and_asks_for_weights_before_it_waits(tmp_path: Path) -> None:
    assert all(0 < int(size) <= SHARED_BYTES for size in run(COMPILE, tmp_path).split())


@pytest.mark.parametrize(
    ("rows", "n", "k", "taken"),
    [
        (33, 2048, 2048, True),
        (64, 2048, 4096, True),
        (64, 2040, 2560, True),
        (32, 2048, 2048, False),
        (65, 2048, 2048, False),
        (64, 2048, 8192, False),
        (64, 2048, 2100, False),
        (64, 4096, 4096, False),
        (64, 5120, 2048, False),
    ],
)
def test_takes_the_sizes_that_were_measured(rows: int, n: int, k: int, taken: bool) -> None:
    from kernels.linear.split_k import INPUTS, split_k_tile

    tile = split_k_tile(rows, n, k, 132)
    assert (tile is not None) == taken
    # all of a program's weights stand in its ring before the wait, and its split is whole slices
    assert tile is None or tile.split * tile.stages * INPUTS == k


@pytest.mark.parametrize("size", [40, 96])
def test_the_norm_adds_up_the_partials_of_a_product(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    from kernels.linear.split_k import SplitKTile
    from kernels.linear_norm import dispatch, kernel

    g = seeded(device)
    x, weight = randn(g, device, torch.float32, 5, 64), randn(g, device, torch.float32, size, 64)
    residual, norm_weight = randn(g, device, torch.float32, 7, size)[:5], randn(g, device, torch.float32, size)

    def partials(workspace: Workspace, x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile) -> torch.Tensor:
        splits = zip(x.chunk(tile.split, dim=1), weight.chunk(tile.split, dim=1), strict=True)
        return torch.stack([a @ b.T for a, b in splits])

    monkeypatch.setattr(dispatch, "linear_partials", partials)
    held = {"declines": lambda problem: None, "config": lambda problem: SplitKTile(4, 1, 1)}
    with dispatch.DISPATCH.changed("split", **held):
        y, h = kernel.linear_norm(workspace(), x, Dense(weight), residual, norm_weight, 1e-5, offset=1.0)
    want = linear(x, Dense(weight), residual=residual)
    assert_close("y", y, want, TOLERANCES[torch.float32])
    assert_close("h", h, rms_norm(want, norm_weight, 1e-5, offset=1.0)[0], TOLERANCES[torch.float32])


def test_a_product_with_a_bias_adds_up_its_own_partials(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.linear_norm import dispatch, kernel

    asked: list[Any] = []
    monkeypatch.setattr(kernel, "group_products", lambda device: True)
    monkeypatch.setattr(kernel, "streams", lambda x, weight: True)
    monkeypatch.setattr(dispatch, "split_k_tile", lambda *sizes: asked.append(sizes))
    one = torch.ones(16, device=device)
    inputs = (one.new_ones(3, 64), Dense(one.new_ones(16, 64)), one.new_zeros(3, 16), one)
    y, _ = kernel.linear_norm(workspace(), *inputs, 0.0, bias=one)
    assert y.unique().tolist() == [65.0]
    assert not asked
    with dispatch.DISPATCH.changed("split"):  # decided anew
        kernel.linear_norm(workspace(), *inputs, 0.0)
    assert asked
