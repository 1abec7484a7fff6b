"""Products of one row with packed integers and 8-bit floats: what is compiled, where there is no GPU to run it.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import run

COMPILE = """
import torch
import kernels.linear.quantized_vector as vector
from kernels.linear.cases import fp8_case, packed_case
from kernels.testing import seeded
from kernels.weight.inputs import Inputs
from tests.compiled import launching

cpu, bf16, square = torch.device("cpu"), torch.bfloat16, (128, 128)
generator = seeded(cpu)
tile = vector.QuantizedVectorTile(4, 4)
with launching() as (workspace, kernels):
    for fused in ({"norm": True}, {"residual": True}):
        for made in (
            packed_case("", bf16, 1, 72, 1152, 4, 128, zeros=True, **fused).make(cpu, generator),
            fp8_case("", bf16, 1, 72, 1152, square, Inputs("fp8", 128), **fused).make(cpu, generator),
        ):
            launch = vector.packed_vector if hasattr(made["weight"], "bits") else vector.fp8_vector
            beside = None, made["norm_weight"], 1e-6, 0.0, made["residual"]
            launch(workspace, made["x"], made["weight"], *beside, tile)
texts = [kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name == "quantized_vector_kernel"]
assert len(texts) == 4
# rounds of nine blocks and four warps: eight instructions a block, and eight for the sum of its inputs
for kind, each in (("bf16.bf16", 16), ("f16.f16", 8)):
    print(*sorted(text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32") == 3 * each for text in texts))
# all blocks of weights are asked for before the kernel before has finished, and nothing loops
before = [text[: text.index("griddepcontrol.wait")] for text in texts]
print(*sorted(text.count("ld.global.v4.b32") for text in before))
print(sum("bra.uni" in text for text in texts))
"""


@pytest.mark.slow
def test_weights_are_asked_for_before_the_wait_and_multiplied_without_a_loop(tmp_path: Path) -> None:
    said = run(COMPILE, tmp_path).splitlines()
    assert said[:2] == ["False False True True"] * 2
    # 16 rows of three blocks: two loads a thread of integers, four of 8-bit floats; where there is one, the norm's too
    asked = [int(count) for count in said[2].split()]
    assert asked[0] == 3 * 2
    assert 3 * 4 in asked
    assert said[3] == "0"
