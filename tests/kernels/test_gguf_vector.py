"""Blocks of GGUF files as operands: what their instructions make of every format's bits, which kernel is chosen, and
what is compiled, where no GPU can run it.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.linear import gguf_operand
from kernels.linear.gguf_dispatch import DISPATCH, GgufProblem
from kernels.weight.gguf import FORMATS, dequantize
from tests.compiled import run
from tests.kernels.ptx import execute

ONE = (0x00, 0x3C)
# Bytes of a block that make every scale 1 and every minimum 0.
SCALES = {
    "Q4_0": {0: ONE},
    "Q4_1": {0: (*ONE, 0, 0)},
    "Q8_0": {0: ONE},
    "Q2_K": {0: (1,) * 16, 80: (*ONE, 0, 0)},
    "Q3_K": {96: (0x11,) * 8 + (0xAA,) * 4, 108: ONE},
    "Q4_K": {0: (*ONE, 0, 0), 4: (1,) * 4 + (0,) * 4 + (1,) * 4},
    "Q5_K": {0: (*ONE, 0, 0), 4: (1,) * 4 + (0,) * 4 + (1,) * 4},
    "Q6_K": {192: (1,) * 16, 208: ONE},
}
COMPILE = """
import torch
import kernels.linear.gguf_vector as vector
from kernels.linear.cases import gguf_case
from kernels.testing import seeded
from tests.compiled import launching

cpu, bf16 = torch.device("cpu"), torch.bfloat16
generator = seeded(cpu)
with launching() as (workspace, kernels):
    for name, rows, act in (("Q4_K", 1, "silu"), ("Q6_K", 1, None), ("Q8_0", 3, None)):
        made = gguf_case("", bf16, rows, 32, 2048, name, activation=act, norm=rows == 1).make(cpu, generator)
        x, part = made["x"], made["weight"].parts[0]
        y = torch.empty(rows, 32, dtype=bf16)
        normed = (made.get("norm_weight"), 1e-6, 0.0)
        vector.gguf_vector(workspace, x, part, name, None, normed, None, y, act, vector.GgufVectorTile(4, 2))
for kernel in kernels:
    text = kernel.asm["ptx"]
    print(text.count("mma.sync.aligned.m16n8k16"), text.count("bar.sync") < 16, kernel.metadata.shared <= 1024)
"""


def unit(name: str, generator: torch.Generator) -> torch.Tensor:
    """Bytes of 256 inputs of a row whose numbers are drawn."""
    form = FORMATS[name]
    made = torch.randint(0, 256, (256 // form.num_values, form.num_bytes), dtype=torch.uint8, generator=generator)
    for at, held in SCALES[name].items():
        made[:, at : at + len(held)] = torch.tensor(held, dtype=torch.uint8)
    return made.flatten()


def word(data: torch.Tensor, chunk: tuple[int, int], index: int) -> int:
    at, apart = chunk
    first = at + index // 4 * apart + index % 4 * 4
    return int.from_bytes(bytes(data[first : first + 4].tolist()), "little")


def numbers(name: str, data: torch.Tensor, group: int, thread: int, dtype: torch.dtype) -> dict[int, float]:
    """Of one of the four threads of a row: input of the group → number."""
    form, bf16 = gguf_operand.FORMS[name], dtype == torch.bfloat16
    two = (2 * thread, 2 * thread + 1) if form.paired else (thread, thread + 4)
    words = [word(data, form.low.chunks[form.low.chunk[group]], index) for index in two]
    if form.high is not None:
        words += [word(data, form.high.chunks[form.high.chunk[group]], index) for index in two]
    made: dict[int, float] = {}
    for upper in (False, True)[: 1 + form.wide]:
        text = gguf_operand.numbers_asm(name, group, bf16, upper)
        registers = execute(text, {4 + place: held for place, held in enumerate(words)})
        for register in range(4):
            step, first = divmod(register, 2)
            for half in range(2):
                bits = registers[register] >> 16 * half & 0xFFFF
                number = torch.tensor([bits - (1 << 16 if bits >> 15 else 0)], dtype=torch.int16).view(dtype).item()
                byte = first + 2 * half
                at = 8 * thread + 4 * step + byte if form.paired else 16 * step + 4 * thread + byte
                made[at] = made.get(at, -gguf_operand.added(name, bf16)) + number
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", gguf_operand.FORMS)
def test_bits_become_the_numbers_of_their_inputs(name: str, dtype: torch.dtype) -> None:
    data = unit(name, torch.Generator().manual_seed(5))
    want = dequantize(data, name).view(8, 32)
    for group in range(8):
        got: dict[int, float] = {}
        for thread in range(4):
            got |= numbers(name, data, group, thread, dtype)
        assert [got[at] for at in range(32)] == want[group].tolist()


def test_few_rows_take_registers_and_others_what_they_took() -> None:
    few = GgufProblem(1, (4096,), 4096, False, False, vector=True)
    assert DISPATCH.choose(few).name == "vector"
    assert DISPATCH.choose(few._replace(outputs=(4096, 4096), gated=True)).name == "vector"
    assert DISPATCH.choose(few._replace(deterministic=True)).name == "tiles"
    assert DISPATCH.choose(few._replace(vector=False)).name == "tiles"
    assert DISPATCH.choose(few._replace(vector=False, rows=1024)).name == "written_out"


@pytest.mark.slow
def test_a_program_needs_no_exchange_but_the_sums_of_its_warps(tmp_path: Path) -> None:
    said = [one.split() for one in run(COMPILE, tmp_path).splitlines()]
    # Two units of each of four warps: 16 instructions, two of ones, which gate and up share; of bytes twice as many;
    # four rows of x.
    assert [int(count) for count, *_ in said] == [2 * (2 * 16 + 2), 2 * (16 + 2), 2 * 4 * (32 + 2)]
    assert {tuple(rest) for _, *rest in said} == {("True", "True")}
