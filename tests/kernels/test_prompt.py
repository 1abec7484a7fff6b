"""The Gluon attention of prompts: who takes which tile, and that it compiles for Hopper where no GPU can run it.

Its results are held by the cases of `paged_attention` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.paged_attention.prompt import KEYS, STAGES, attend_kernel
from tests.compiled import box, for_hopper

for width, dim, extras in ((4, 128, False), (8, 64, True)):
    constants = {
        "H": 2 * width, "G": 2, "GROUP": width, "WIDTH": width, "D": dim, "BLOCK_SIZE": 16, "COPIED": 16,
        "BLOCK_N": KEYS, "STAGES": STAGES, "HAS_SOFTCAP": extras, "HAS_SINKS": extras, "PDL": True,
    }
    kinds = {
        "q_desc": box(64 // width, width, 64), "k_desc": box(16, 64), "v_desc": box(16, 64), "p_sinks": "*bf16",
        "p_out": "*bf16", "scale": "fp32", "softcap": "fp32", "v_scale": "fp32",
    }
    made = for_hopper(
        attend_kernel, constants, lambda name: kinds.get(name, "*i32" if name.startswith("p_") else "i32")
    )
    ptx = made.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{dim}k16" in ptx
    assert "cp.async.bulk.tensor.3d" in ptx and "cp.async.bulk.tensor.2d" in ptx
    assert "setmaxnreg" in ptx, "the reading warp gives its registers away"
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert all(0 < int(size) < SHARED_BYTES for size in run(COMPILE, tmp_path).split())


@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(1, 40), seqs=st.integers(1, 9), groups=st.integers(1, 8), programs=st.integers(1, 132))
def test_every_tile_has_one_program_and_loads_are_even(ranks: int, seqs: int, groups: int, programs: int) -> None:
    from kernels.hopper.schedule import tile_spot, turn_place

    place, spot = turn_place.fn, tile_spot.fn
    total = ranks * seqs * groups
    programs = min(programs, total)
    turns = -(-total // programs)
    taken = [[place(turn, program, programs) for turn in range(turns)] for program in range(programs)]
    assert sorted(number for some in taken for number in some) == list(range(turns * programs))
    spots = [spot(number, seqs, groups) for number in range(total)]
    assert sorted(spots) == [(g, i, r) for g in range(groups) for i in range(seqs) for r in range(ranks)]
    # Fresh prompts of one length: a tile of rank r sees ranks - r tiles of keys.
    work = [sum(ranks - number // groups // seqs for number in some if number < total) for some in taken]
    assert max(work) <= sum(work) / programs + ranks
