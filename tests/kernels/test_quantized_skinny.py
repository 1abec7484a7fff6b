"""Products of up to 8 rows with packed integers and 8-bit floats: what is compiled, where there is no GPU to run it.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import run

COMPILE = """
import torch
import triton
import kernels.linear.quantized_skinny as skinny
from kernels.workspace import Workspace
from kernels.compilation.ahead import Compiler
from kernels.linear.cases import fp8_case, packed_case
from kernels.testing import seeded
from kernels.weight.inputs import Inputs
from tests.kernels.compilation.driver import Driver

triton.runtime.driver.set_active(Driver())
cpu, bf16, square = torch.device("cpu"), torch.bfloat16, (128, 128)
workspace, generator = Workspace(cpu), seeded(cpu)
workspace.pdl = True
tile, group = skinny.QuantizedSkinnyTile(4, 4), Inputs("fp8", 128)
with Compiler(1, None) as compiler:
    with compiler.only(workspace):
        for rows in (1, 8):
            case = packed_case("", bf16, rows, 72, 1152, 4, 128, zeros=True, norm=rows == 1, residual=True)
            made = case.make(cpu, generator)
            norm = made["norm_weight"] if rows == 1 else None
            skinny.packed_skinny(workspace, made["x"], made["weight"], None, norm, 1e-6, 0.0, made["residual"], tile)
        made = fp8_case("", bf16, 1, 72, 1152, square, group, norm=True).make(cpu, generator)
        normed = made["norm_weight"], 1e-6, 0.0
        skinny.fp8_skinny(workspace, made["x"], None, made["weight"], None, *normed, None, tile, bf16)
        x, scales = torch.zeros(8, 1152).to(torch.float8_e4m3fn), torch.ones(8, 9)
        skinny.fp8_skinny(workspace, x, scales, made["weight"], None, None, 1e-6, 0.0, None, tile, bf16)
    kernels = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in compiler._made.values()]
    texts = [kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name == "quantized_skinny_kernel"]
    assert len(texts) == 4
    # rounds of nine blocks and four warps: eight instructions a block, and eight for the sum of its inputs
    for kind, each in (("bf16.bf16", 16), ("f16.f16", 8)):
        print(*sorted(text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32") == 3 * each for text in texts))
    # four blocks of weights are asked for before the kernel before has finished, and no weight stands still in a loop
    before = [text[: text.index("griddepcontrol.wait")] for text in texts]
    print(*sorted(text.count("ld.global.v4.b32") for text in before))
    print(sum("bra.uni" in text or "$L__BB0_1:" in text for text in texts))
"""


@pytest.mark.slow
def test_weights_are_asked_for_before_the_wait_and_multiplied_without_a_loop(tmp_path: Path) -> None:
    said = run(COMPILE, tmp_path).splitlines()
    assert said[:2] == ["False False True True"] * 2
    asked = [int(count) for count in said[2].split()]
    # 16 rows of a block: two loads a thread of integers, four of 8-bit floats; one row's norm is read there too
    assert asked[0] == 3 * 2
    assert asked[-1] >= 3 * 4
    assert said[3] == "0"
