"""Integers in groups of 32 and 64 as operands: what their instructions make of every integer, zero point and scale, and
which kernels are compiled, where no GPU can run them.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compiled import run
from tests.kernels.ptx import execute

# Of each register's two integers: bytes of the word, and how far up in them.
SOURCES = {
    "words": ((0, 2, 0), (0, 2, 4), (1, 3, 0), (1, 3, 4)),
    "pairs": ((0, 1, 0), (2, 3, 0), (0, 1, 4), (2, 3, 4)),
}
COMPILE = """
import torch
import kernels.linear.quantized_row_stream as row_stream
import kernels.linear.quantized_stream as stream
import kernels.linear.quantized_vector as vector
from kernels.linear.cases import packed_case
from kernels.linear.packed_dispatch import row_stream_tile, stream_tile, vector_tile
from kernels.testing import seeded
from tests.compiled import launching

stream.multiprocessors = row_stream.multiprocessors = lambda device: 132
cpu, bf16, f16 = torch.device("cpu"), torch.bfloat16, torch.float16
generator, counts = seeded(cpu), torch.zeros(512, dtype=torch.int32)
with launching() as (workspace, kernels):
    for rows, group, zeros, act, dtype in (
        (8, 32, False, "silu", bf16),
        (16, 64, True, None, bf16),
        (32, 32, True, None, bf16),
        (64, 64, False, "silu", f16),
    ):
        case = packed_case("", dtype, rows, 256, 640, 4, group, zeros=zeros, scales=dtype, activation=act)
        made, tile = case.make(cpu, generator), stream_tile(rows, 256, act is not None, 132)
        stream.packed_stream(workspace, made["x"], made["weight"], None, None, act, tile, counts)
    for group, zeros, act in ((32, False, "silu"), (64, True, None)):
        case = packed_case("", bf16, 1, 4096, 4096, 4, group, zeros=zeros, activation=act, norm=True)
        made, tile = case.make(cpu, generator), row_stream_tile(act is not None)
        beside = made["norm_weight"], 1e-6, 0.0, None
        row_stream.packed_row_stream(workspace, made["x"], made["weight"], None, *beside, act, tile, counts)
        case = packed_case("", bf16, 1, 72, 4096, 4, group, zeros=zeros, norm=True)
        made = case.make(cpu, generator)
        vector.packed_vector(workspace, made["x"], made["weight"], None, *beside, vector_tile(4096))
for kernel in kernels:
    text = kernel.asm["ptx"]
    if kernel.metadata.name == "order_kernel":
        continue
    print(kernel.metadata.name, text.count("mma.sync.aligned.m16n8k16"), text.count("wgmma.mma_async.sync"))
"""


def words(*parts: int) -> int:
    """Bytes as a word, the first in the low bits."""
    return sum(part << 8 * place for place, part in enumerate(parts))


def twice(number: torch.Tensor) -> int:
    bits = int(number.view(torch.int16)) & 0xFFFF
    return bits << 16 | bits


def operand(text: str, dtype: torch.dtype, word: int, scale: torch.Tensor, zero: int | None) -> list[float]:
    given = {4: word, 5: twice(scale), 6: twice(scale)}
    if zero is not None:
        given |= {7: zero << 16 | zero, 8: zero << 16 | zero}
    made = execute(text, given)
    halves = [made[to] >> shift & 0xFFFF for to in range(4) for shift in (0, 16)]
    signed = [half - (1 << 16 if half >> 15 else 0) for half in halves]
    return torch.tensor(signed, dtype=torch.int16).view(dtype).double().tolist()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("order", ["words", "pairs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_integer_less_its_zero_point_by_its_scale_is_rounded_once(
    dtype: torch.dtype, order: str, zeros: bool
) -> None:
    """As where a weight is written out. Those of bfloat16 are 2^64 too low."""
    from kernels.linear import packed_groups as groups

    kind = "BF16" if dtype == torch.bfloat16 else "F16"
    text = getattr(groups, f"{kind}_{order.upper()}" + ("_ZERO" if zeros else "")).value
    lowered = groups.LOWERED.value if dtype == torch.bfloat16 else 1.0
    scales = torch.tensor([0.0, 1.0, 0.0131, -0.37, 6.1e-5, 3e-3, 200.0]).to(dtype)
    for scale in scales:
        for zero in range(17) if zeros else (8,):
            for first in range(0, 16, 4):
                held = [first | (first + 1) << 4, first + 2 | (first + 3) << 4, (first * 7 + 3) % 256, 0xF0]
                got = operand(text, dtype, words(*held), scale, zero if zeros else None)
                integers = [held[place] >> up & 15 for one, two, up in SOURCES[order] for place in (one, two)]
                exact = torch.tensor(integers, dtype=torch.float64).sub(zero) * scale.double()
                assert [number * lowered for number in got] == exact.float().to(dtype).double().tolist()


@pytest.mark.slow
def test_groups_have_kernels_of_few_rows_and_of_one(tmp_path: Path) -> None:
    said = [one.split() for one in run(COMPILE, tmp_path).splitlines()]
    counts = {name: sorted((int(small), int(large)) for one, small, large in said if one == name) for name, *_ in said}
    assert counts == {
        # eight instructions for a block of 128 inputs and eight rows: none for sums of inputs, as scales are inside
        "quantized_stream_kernel": [(0, 2 * 8), (0, 2 * 2 * 8), (2 * 2 * 8, 0), (2 * 2 * 8, 0)],
        "quantized_row_stream_kernel": [(2 * 2 * 8, 0), (4 * 8, 0)],
        # eight blocks of each of four warps, and as many instructions for sums of inputs
        "quantized_vector_kernel": [(2 * 8 * 8, 0), (2 * 8 * 8, 0)],
    }
