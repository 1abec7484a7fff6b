"""Products of a decode step's pairs with experts of packed numbers on Hopper: every kind of weight compiles where there
is no GPU to run it, and unpacks without shared memory between threads.

Results are held by the cases of `moe_gemm` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.warmup import warmup_steps
from kernels.moe_gemm.alone_cut import ALONE_PAIRS, AloneCut, packed_cut
from kernels.moe_gemm.quantized_ring import RingTile, ring_tile
from tests.compiled import SHARED_BYTES, run

COMPILE = """
import torch
from kernels.moe_gemm.cases import fp4_case, packed_case
from kernels.moe_gemm.quantized_ring import RingTile, quantized_ring_moe
from kernels.testing import seeded
from tests.compiled import launching

cpu, bf16 = torch.device("cpu"), torch.bfloat16
generator = seeded(cpu)
tiles = ((2, (8, 64, 6, 3)), (20, (16, 64, 4)), (20, (8, 128, 2)), (20, (16, 128, 2)))
names = ("x", "gate_up", "down", "weights", "experts", "residual", "activation", "limit", "biases")
sizes = (320, 192, 6, 4)
with launching() as (workspace, kernels):
    for t, tile in tiles:
        for case in (
            fp4_case("", bf16, t, *sizes, biased=True, activation="swiglu_oai", limit=1.0),
            fp4_case("", bf16, t, *sizes, 16, True),
            packed_case("", bf16, t, *sizes, zeros=True),
            packed_case("", bf16, t, *sizes, group=128),
        ):
            given = {"activation": "silu", "limit": None, "biases": None, **case.make(cpu, generator)}
            quantized_ring_moe(workspace, *(given[name] for name in names), RingTile(*tile))
kernels = [kernel for kernel in kernels if kernel.metadata.name == "quantized_list_kernel"]
texts = [kernel.asm["ptx"] for kernel in kernels]
print(len(texts), sum("mma.sync.aligned.m16n8k16.row.col.f32.bf16" in text for text in texts))
print(max(kernel.metadata.shared for kernel in kernels))
"""


@pytest.mark.slow
def test_packed_experts_are_multiplied_from_registers(tmp_path: Path) -> None:
    launches, registers, shared = run(COMPILE, tmp_path).split()
    assert (launches, registers) == ("32", "32")
    assert int(shared) * 2 <= SHARED_BYTES, "two programs share a multiprocessor"


@pytest.mark.parametrize(
    ("pairs", "experts", "tile"),
    [
        pytest.param(32, 256, RingTile(8, 64, 0), id="few pairs are a tile each"),
        pytest.param(33, 256, RingTile(8, 128, 2), id="eight pairs of an expert"),
        pytest.param(1024, 256, RingTile(8, 128, 2), id="four pairs an expert on average are rarely more than eight"),
        pytest.param(1025, 256, RingTile(16, 128, 2), id="sixteen pairs of an expert"),
        pytest.param(3072, 256, RingTile(16, 128, 2), id="twelve an expert on average are rarely more than sixteen"),
        pytest.param(3073, 256, RingTile(32, 128, 2), id="thirty-two pairs of an expert"),
    ],
)
def test_a_tile_has_as_many_pairs_as_an_expert_is_likely_to_have(pairs: int, experts: int, tile: RingTile) -> None:
    assert ring_tile(pairs, experts) == tile


@pytest.mark.parametrize(
    ("columns", "k", "units", "splits", "stages"),
    [
        pytest.param(32, 6, 16, 2, 6, id="up to four programs a multiprocessor"),
        pytest.param(22, 8, 16, 3, 4, id="as many as fit whole times"),
        pytest.param(6, 4, 64, 4, 6, id="four at most"),
        pytest.param(6, 4, 13, 3, 5, id="four units a program at least, no more stages than units"),
        pytest.param(6, 4, 7, 1, 6, id="few units stay together"),
        pytest.param(66, 6, 16, 1, 6, id="three programs a multiprocessor have six stages"),
        pytest.param(66, 8, 16, 1, 4, id="four have four"),
        pytest.param(128, 8, 28, 1, 3, id="more programs than the GPU has room for"),
    ],
)
def test_tiles_of_a_pair_fill_the_gpu_once(columns: int, k: int, units: int, splits: int, stages: int) -> None:
    assert packed_cut(columns, 1, k, units, multiprocessors=132) == AloneCut(splits, stages)


@given(
    columns=st.integers(1, 128),
    k=st.integers(1, 16),
    units=st.integers(1, 64),
    data=st.data(),
)
def test_any_number_of_tokens_has_a_cut_of_a_warmup_step(columns: int, k: int, units: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, max(1, ALONE_PAIRS // k)))
    met = {
        packed_cut(columns, step.tokens, k, units, 132)
        for step in warmup_steps(256, 8192, 8192)
        if step.tokens * k <= ALONE_PAIRS or step.tokens == 1
    }
    assert packed_cut(columns, tokens, k, units, 132) in met
