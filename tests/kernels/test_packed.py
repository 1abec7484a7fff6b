"""Products of integers compile for Hopper where there is no GPU to run them, and one kernel serves the rows of a
tile; a weight's numbers are those of its definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.weight import PackedInt
from kernels.weight.packed import integers, packed
from tests.compiled import SHARED_BYTES, run

COMPILE = """
from collections import Counter
import torch
import triton
from kernels.workspace import Workspace
from kernels.compilation.ahead import Compiler
from kernels.linear import fp8, packed
from kernels.linear.unpack import unpacked
from kernels.linear.cases import int8_case, packed_case
from kernels.moe_gemm import quantized as experts
from kernels.moe_gemm.cases import w8a8_case, packed_case as experts_case
from kernels.testing import seeded
from kernels.weight.inputs import Inputs
from tests.kernels.compilation.driver import Driver

triton.runtime.driver.set_active(Driver())
compiled, shared = Counter(), []


def heard(*, src, metadata, **_):
    compiled[src.name] += 1
    shared.append(metadata["shared"])


triton.knobs.compilation.listener = heard
workspace, cpu = Workspace(torch.device("cpu")), torch.device("cpu")
bf16, generator = torch.bfloat16, seeded(cpu)
whole = {"zeros": True, "ordered": True}
with Compiler(1, None) as compiler, compiler.only(workspace):
    for rows in (1, 3, 16):
        packed.linear(workspace, **packed_case("", bf16, rows, 96, 256, 4, 128, residual=True).make(cpu, generator))
    case = packed_case("", bf16, 64, 96, 256, 4, 32, activation="silu", **whole)
    packed.linear(workspace, **case.make(cpu, generator))
    for bits, group, zeros in ((8, 64, False), (4, 128, True), (4, 256, False)):
        case = packed_case("", bf16, 1, 96, 256, bits, group, zeros=zeros)
        unpacked(workspace, case.make(cpu, generator)["weight"], bf16)
    experts.moe_gemm(workspace, **experts_case("", bf16, 4, 256, 128, 16, 4, **whole).make(cpu, generator))
    for inputs, given in ((Inputs("fp8", 128), {"block": (128, 128)}), (Inputs("int8"), {"whole": True})):
        experts.moe_gemm(workspace, **w8a8_case("", bf16, 4, 256, 128, 16, 4, inputs, **given).make(cpu, generator))
    for rows in (9, 300):
        fp8.linear(workspace, **int8_case("", bf16, rows, 256, 256, Inputs("int8"), residual=True).make(cpu, generator))
print(*(f"{name}:{count}" for name, count in sorted(compiled.items())), max(shared))
"""


@pytest.mark.slow
def test_compiles_for_hopper_once_for_all_rows_of_a_tile(tmp_path: Path) -> None:
    *counts, shared = run(COMPILE, tmp_path).split()
    assert counts == [
        "_count:1",
        "_quantize:4",
        "combine:1",
        "fp8_kernel:2",
        "packed_down:1",
        "packed_kernel:2",
        "packed_up:1",
        "unpack_kernel:1",
        "unpack_words_kernel:2",
        "w8a8_down:2",
        "w8a8_up:2",
    ]
    assert int(shared) <= SHARED_BYTES


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed_comes_back_in_place(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, 21), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = packed(numbers, bits)
    assert data.shape[-1] % 4 == 0
    assert torch.equal(integers(data, bits)[:, :21], numbers)
    words = data.contiguous().view(torch.int32)
    for k in range(21):
        place = k * bits
        assert torch.equal(words[:, place // 32] >> place % 32 & (1 << bits) - 1, numbers[:, k].int())


def test_each_number_is_less_its_groups_zero_point_and_times_its_scale() -> None:
    numbers = torch.tensor([[0, 15, 7, 8, 1]], dtype=torch.uint8)
    scale, zero = torch.tensor([[0.5, 2.0, 4.0]]), torch.tensor([[1, 16, 0]], dtype=torch.uint8)
    order = torch.tensor([4, 0, 3, 1, 2], dtype=torch.int32)
    weight = PackedInt(packed(numbers, 4), scale, zero, order, 4, 2, 5)
    held = [-0.5, 7.0, -18.0, -16.0, 4.0]
    wanted = [held[1], held[3], held[4], held[2], held[0]]
    assert weight.dense(torch.float32).tolist() == [wanted]
    assert PackedInt(packed(numbers, 4), scale, None, None, 4, 2, 5).dense(torch.float32).tolist() == [
        [-4.0, 3.5, -2.0, 0.0, -28.0]
    ]


def test_columns_that_are_worth_zero_stand_for_no_input() -> None:
    numbers = torch.tensor([[3, 8, 9, 2, 8, 8]], dtype=torch.uint8)
    order = torch.tensor([2, 0, 0, 1, 0, 0], dtype=torch.int32)
    weight = PackedInt(packed(numbers, 4), torch.tensor([[0.5, 2.0, 4.0]]), None, order, 4, 2, 3)
    assert (weight.shape, weight.columns) == ((1, 3), 6)
    assert weight.dense(torch.float32).tolist() == [[2.0, -12.0, -2.5]]
    x = torch.tensor([[1.0, 10.0, 100.0]])
    assert weight.product(x).tolist() == [[2.0 - 120.0 - 250.0]]
    apart = weight.in_place()
    assert (apart.shape, apart.order) == ((1, 6), None)
    assert torch.equal(apart.product(x[:, order.long()]), weight.product(x))
