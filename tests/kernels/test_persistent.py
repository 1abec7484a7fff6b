"""The Gluon product of many rows whose sums are the stream's: that it compiles for Hopper without a GPU.

Its results are held on a GPU by `test_batch_invariant` and the cases of `linear`: Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.linear.persistent import FEEDER_REGISTERS, INPUTS, REGISTERS, UNIT, persistent_kernel
from tests.compiled import box, for_hopper

for teams, stages, splits in ((2, 5, 3), (3, 4, 1)):
    before, after = REGISTERS[teams]
    constants = {
        "SPLITS": splits, "BN": 128, "BK": INPUTS, "UNIT_SLICES": UNIT // INPUTS, "TEAMS": teams, "STAGES": stages,
        "BAND": 16, "BIAS": True, "RESIDUAL": True, "REGISTERS": after, "FEEDER_REGISTERS": FEEDER_REGISTERS,
        "PDL": True,
    }
    kinds = {"x_desc": 64, "w_desc": 128, "residual_desc": 64, "y_desc": 64}
    kinds = {name: box(rows, 128 if name[0] in "ry" else INPUTS) for name, rows in kinds.items()}
    kinds["bias_ptr"] = "*bf16"
    made = for_hopper(persistent_kernel, constants, lambda name: kinds.get(name, "i32"), maxnreg=before)
    assert made.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n128k16") == teams * 4, "four products a slice"
    print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert all(0 < int(size) <= SHARED_BYTES for size in run(COMPILE, tmp_path).split())
