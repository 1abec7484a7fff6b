"""Products of groups with 8-bit floats: what is compiled for Hopper, where no GPU can run it.

Results are held by the cases of `group_linear` (tests/kernels/test_ops.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, run

COMPILE = """
import torch
from kernels.group_linear.dispatch import Problem, fp8_tile
from kernels.group_linear.fp8 import group_fp8
from kernels.weight import Fp8
from kernels.weight.inputs import Inputs
from tests.compiled import launching

bf16 = torch.bfloat16
data, scale = torch.zeros(8, 1024, 4096, dtype=torch.float8_e4m3fn), torch.ones(8, 8, 32)
weight = Fp8(data, scale, (128, 128), Inputs())
with launching() as (workspace, kernels):
    for rows in (1, 64):
        tile = fp8_tile(Problem(rows, 4096, bf16, fp8=True, deterministic=False))
        group_fp8(workspace, torch.zeros(rows, 32768, dtype=bf16), weight, tile)
for kernel in kernels:
    text, layouts = kernel.asm["ptx"], kernel.asm["ttgir"]
    # weights are asked for before the kernel before has finished, and read in its place after that
    wait = text.index("griddepcontrol.wait")
    print(text.index("prefetch.global.L2") < wait < text.index("cp.async.c"), end=" ")
    # no tensor goes to shared memory by registers
    print("ttg.local_alloc %" not in layouts, end=" ")
    print("wgmma" in text, "mma.sync" in text, kernel.metadata.shared)
"""


@pytest.mark.slow
def test_weights_are_converted_where_they_are_multiplied(tmp_path: Path) -> None:
    said = run(COMPILE, tmp_path).splitlines()
    assert len(said) == 2
    for text, (long, programs) in zip(said, ((False, 2), (True, 1)), strict=True):
        *held, shared = text.split()
        assert held == ["True", "True", str(long), str(not long)]
        # with what each program of a multiprocessor has beside its own
        assert SHARED_BYTES // (int(shared) + 1024) >= programs
