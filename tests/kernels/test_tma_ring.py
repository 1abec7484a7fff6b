"""The Gluon products of a decode step's experts: when they are taken, and that they compile for Hopper where there is
no GPU to run them.

Their results are held by the cases of `moe` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.routing import Routing
from kernels.testing import workspace
from kernels.weight import Dense
from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.moe_gemm.tma_ring import DOWN, UP, list_kernel
from tests.compiled import box, for_hopper

for act, tile in (("silu", UP), (None, DOWN)):
    constants = {
        "K": 8, "ROWS": 16, "BN": tile.outputs, "BK": tile.inputs, "BLOCK_E": 128, "STAGES": tile.stages, "ACT": act,
        "LIMITED": act is not None, "PDL": True,
    }
    kinds = {
        "x": "*bf16", "w_desc": box(tile.outputs, tile.inputs), "pairs": "*i32", "counts": "*i32", "weights": "*fp32",
        "y": "*bf16", "limit": "fp32",
    }
    aligned = ("x", "pairs", "counts", "weights", "y", "inputs", "outputs", "expert_rows")
    made = for_hopper(list_kernel, constants, lambda name: kinds.get(name, "i32"), aligned)
    ptx = made.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in ptx
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait"), "weights are asked for before the wait"
    assert "st.local" not in ptx
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper_and_asks_for_weights_before_it_waits(tmp_path: Path) -> None:
    sizes = [int(size) for size in run(COMPILE, tmp_path).split()]
    assert len(sizes) == 2
    assert all(0 < size <= SHARED_BYTES // 2 for size in sizes), "two programs fit a multiprocessor"


@pytest.mark.parametrize(
    ("hidden", "inter", "dtype", "taken"),
    [
        (128, 256, torch.bfloat16, True),
        (256, 128, torch.float16, True),
        (128, 128, torch.float32, False),
        (192, 128, torch.bfloat16, False),
        (128, 64, torch.bfloat16, False),
    ],
)
def test_it_is_taken_for_decode_steps_in_whole_boxes(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, hidden: int, inter: int, dtype: torch.dtype, taken: bool
) -> None:
    from kernels.moe import dense, dispatch
    from kernels.moe_gemm import tma_ring

    asked: list[Any] = []
    monkeypatch.setattr(tma_ring, "group_products", lambda device: True)
    monkeypatch.setattr(dispatch, "lists_moe", lambda *inputs: asked.append(inputs))
    monkeypatch.setattr(dispatch, "tiles_moe", lambda *inputs: None)
    x, router = torch.randn(20, hidden, device=device).to(dtype), torch.randn(4, hidden, device=device)
    gate_up, down = x.new_empty(4, 2 * inter, hidden), x.new_empty(4, hidden, inter)
    dense.moe(workspace(), x, router, Dense(gate_up), Dense(down), Routing(2))
    assert bool(asked) == taken


@settings(deadline=None, max_examples=80)
@given(
    routed=st.integers(1, 70),
    shared=st.integers(0, 3),
    parts=st.integers(1, 4),
    columns=st.integers(1, 24),
    more=st.integers(0, 5),
)
def test_tiles_of_shared_experts_stand_evenly_among_first_tiles(
    routed: int, shared: int, parts: int, columns: int, more: int
) -> None:
    from kernels.moe_gemm import tma_ring

    tiles = shared * parts + routed + more
    programs = SimpleNamespace(
        num_programs=lambda axis: columns, maximum=max, where=lambda which, one, other: one if which else other
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tma_ring, "gl", programs)
        taken = [
            tma_ring._spread.fn(t, c, routed + shared, shared, parts) for t in range(tiles) for c in range(columns)
        ]
    assert sorted(taken) == [(tile, column) for tile in range(tiles) for column in range(columns)]
    first = taken[: (shared * parts + routed) * columns]
    before = [sum(tile < shared * parts for tile, _ in first[:at]) for at in range(len(first) + 1)]
    share = before[-1] / len(first)
    assert all(abs(count - at * share) < 1 for at, count in enumerate(before))
    # a tile's parts are read side by side, so that one of them finds what another has asked for
    own = [(tile, column) for tile, column in first if tile < shared * parts]
    assert all(own[i][1] == own[i - i % parts][1] for i in range(len(own)))
