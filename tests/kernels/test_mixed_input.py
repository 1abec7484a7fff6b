"""Products of many rows with packed weights that are never written out: tiles compile where there is no GPU, and the
weight is an operand in registers.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, run

COMPILE = """
import re
import torch
import kernels.linear.mixed_input as mixed
from kernels.linear.cases import packed_case
from kernels.testing import seeded
from tests.compiled import launching

mixed.multiprocessors = lambda device: 132
cpu, bf16 = torch.device("cpu"), torch.bfloat16
counts = torch.zeros(512, dtype=torch.int32)
case = packed_case("", bf16, 100, 256, 640, 4, 128, zeros=True, bias=True, residual=True)
made = case.make(cpu, seeded(cpu))
with launching() as (workspace, kernels):
    for rows, outputs, stages, warps, split in ((128, 128, 5, 8, 0), (256, 128, 3, 8, 1), (64, 128, 8, 8, 2)):
        tile = mixed.MixedInputTile(rows, outputs, stages, warps, split)
        given = (made["x"], made["weight"], made["bias"], made["residual"])
        mixed.mixed_input_linear(workspace, *given, tile, counts)
for kernel in kernels:
    text = kernel.asm["ptx"]
    assert text.index("cp.async.bulk.tensor") < text.rindex("griddepcontrol.wait")
    products = re.findall(r"wgmma.mma_async[.a-z0-9]*(m64n[0-9]+k16)[^;]*, *\\{(?:%r[0-9]+,? *){4}\\}, *%rd", text)
    print(text.count("wgmma.mma_async"), len(products), products[0], kernel.metadata.shared)
"""


@pytest.mark.slow
def test_weights_are_multiplied_from_registers(tmp_path: Path) -> None:
    printed = [text.split() for text in run(COMPILE, tmp_path).splitlines()]
    # of 128 inputs by 16, for the 64 outputs of each of two warpgroups
    assert [text[:3] for text in printed] == [["8", "8", f"m64n{rows}k16"] for rows in (128, 256, 64)]
    assert max(int(text[3]) for text in printed) <= SHARED_BYTES
