"""The Gluon products of many pairs: when they are taken, and that they compile for Hopper where there is no GPU to run
them.

Their results are held by the cases of `moe_gemm` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.testing import workspace
from kernels.weight import Dense
from tests.compiled import SHARED_BYTES, run

COMPILE = """
import re

from kernels.moe_gemm.grouped import BOX, PARTS, REGISTERS, ROWS, STAGES, grouped_kernel
from tests.compiled import box, for_hopper

lists = {name: "*i32" for name in ("tokens", "tile_expert", "tile_pairs", "ends", "turns")}
kinds = {"x": "*bf16", "limit": "fp32", **lists, **{name: box(BOX, BOX) for name in ("x_desc", "w_desc", "y_desc")}}
for act, box_rows in (("silu", BOX), (None, ROWS)):
    constants = {
        "GATHER": act is not None, "ACT": act, "LIMITED": act is not None, "PARTS": PARTS, "STAGES": STAGES, "PDL": True
    }
    kinds["w_desc"] = box(box_rows, BOX)
    aligned = ("x", "hidden", "tokens")
    made = for_hopper(grouped_kernel, constants, lambda name: kinds.get(name, "i32"), aligned, maxnreg=REGISTERS)
    ptx = made.asm["ptx"]
    slices = PARTS + 1  # in front of the loop and within
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 2 * slices * 4, "two groups, four products a slice"
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k16") == 2 * slices * 4, "the same for a short tile"
    during = re.findall(r"wgmma.commit_group.*?wgmma.wait_group", ptx, re.DOTALL)
    written = sum("cp.async.bulk.tensor.2d.global.shared" in slice_ for slice_ in during)
    assert written == 2 * 2 * (2 if act is None else 1), "each group writes the tile before while it multiplies"
    assert act is None or sum("ex2.approx" in slice_ for slice_ in during) == 2 * 2, "and activates half of it"
    assert (ptx.count("cp.async.cg") == 8) == (act is not None), "a tile's rows, 16 bytes a copy"
    assert "st.local" not in ptx
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    sizes = [int(size) for size in run(COMPILE, tmp_path).split()]
    assert len(sizes) == 2
    assert all(0 < size <= SHARED_BYTES for size in sizes)


@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "dtype", "taken"),
    [
        (33, 128, 64, torch.bfloat16, True),
        (33, 128, 64, torch.float16, True),
        (32, 128, 64, torch.bfloat16, False),
        (33, 128, 64, torch.float32, False),
        (33, 96, 64, torch.bfloat16, False),
        (33, 128, 96, torch.bfloat16, False),
    ],
)
def test_it_is_taken_for_many_pairs_in_whole_boxes(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    tokens: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
    taken: bool,
) -> None:
    from kernels.moe_gemm import dense, dispatch, grouped

    asked: list[Any] = []
    monkeypatch.setattr(grouped, "group_products", lambda device: True)
    monkeypatch.setattr(dispatch, "grouped_moe", lambda *inputs: asked.append(inputs))
    monkeypatch.setattr(dispatch, "tiles_moe", lambda *inputs: None)
    experts = torch.zeros(tokens, 1, dtype=torch.int32, device=device)
    x, weights = torch.empty(tokens, hidden, dtype=dtype, device=device), torch.ones(tokens, 1, device=device)
    gate_up, down = x.new_empty(1, 2 * inter, hidden), x.new_empty(1, hidden, inter)
    dense.moe_gemm(workspace(), x, Dense(gate_up), Dense(down), weights, experts)
    assert bool(asked) == taken
