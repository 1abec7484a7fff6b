"""A weight of 4-bit floats has the numbers of its definition, and its kernels read scales as they are stored."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kernels.linear.unpack import unpacked
from kernels.weight import Fp4
from kernels.weight.packed import packed
from kernels.workspace import Workspace
from tests.compiled import SHARED_BYTES, run

CODES = torch.arange(16, dtype=torch.uint8).repeat(2)[None]
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]

COMPILE = """
from collections import Counter
import torch
import triton
from kernels.workspace import Workspace
from kernels.compilation.ahead import Compiler
from kernels.linear import packed
from kernels.linear.unpack import unpacked
from kernels.linear.cases import fp4_case
from kernels.moe_gemm import quantized as experts
from kernels.moe_gemm.cases import fp4_case as experts_case
from kernels.testing import seeded
from tests.kernels.compilation.driver import Driver

triton.runtime.driver.set_active(Driver())
compiled, shared = Counter(), []


def heard(*, src, metadata, **_):
    compiled[src.name] += 1
    shared.append(metadata["shared"])


triton.knobs.compilation.listener = heard
workspace, cpu = Workspace(torch.device("cpu")), torch.device("cpu")
bf16, generator = torch.bfloat16, seeded(cpu)
with Compiler(1, None) as compiler, compiler.only(workspace):
    for group, factors in ((32, False), (16, True)):
        for rows in (1, 3, 16):
            case = fp4_case("", bf16, rows, 96, 256, group, factors=factors, residual=True)
            packed.linear(workspace, **case.make(cpu, generator))
        case = fp4_case("", bf16, 1, 96, 256, group, factors=factors)
        unpacked(workspace, case.make(cpu, generator)["weight"], bf16)
        case = experts_case("", bf16, 4, 256, 128, 16, 4, group, factors)
        experts.moe_gemm(workspace, **case.make(cpu, generator))
wanted = ("packed_down", "packed_kernel", "packed_up", "unpack_kernel")
print(*(f"{name}:{compiled[name]}" for name in wanted), max(shared))
"""


@pytest.mark.slow
def test_compiles_for_hopper_once_for_all_rows_of_a_tile(tmp_path: Path) -> None:
    *counts, shared = run(COMPILE, tmp_path).split()
    assert counts == ["packed_down:2", "packed_kernel:2", "packed_up:2", "unpack_kernel:2"]
    assert int(shared) <= SHARED_BYTES


def weight(scale: torch.Tensor, factor: float | None, group: int) -> Fp4:
    return Fp4(packed(CODES, 4), scale, None if factor is None else torch.tensor([factor]), group, CODES.shape[-1])


def on(held: Fp4, device: torch.device) -> Fp4:
    factor = None if held.factor is None else held.factor.to(device)
    return Fp4(held.data.to(device), held.scale.to(device), factor, held.group, held.inputs)


@pytest.mark.parametrize("byte", [1, 100, 127, 150, 240])
def test_a_byte_is_an_exponent_and_not_a_number(byte: int, device: torch.device) -> None:
    held = weight(torch.tensor([[byte]], dtype=torch.uint8), None, 32)
    wanted = torch.tensor([[value * 2.0 ** (byte - 127) for value in VALUES * 2]])
    assert torch.equal(held.dense(torch.float32), wanted)
    assert torch.equal(unpacked(Workspace(device), on(held, device), torch.float32).cpu(), wanted)


def test_exponents_at_both_ends() -> None:
    held = weight(torch.tensor([[0]], dtype=torch.uint8), None, 32).dense(torch.float64)
    assert held[0, 2].item() == 2.0**-127
    assert all(map(math.isnan, weight(torch.tensor([[255]], dtype=torch.uint8), None, 32).dense(torch.float32)[0]))


def test_a_group_of_16_has_a_scale_and_a_row_a_factor(device: torch.device) -> None:
    scale = torch.tensor([[0.25, 448.0]]).to(torch.float8_e4m3fn)
    held = weight(scale, 0.125, 16)
    wanted = torch.tensor([[value * by * 0.125 for by in (0.25, 448.0) for value in VALUES]])
    assert torch.equal(held.dense(torch.float32), wanted)
    assert torch.equal(held.rows(torch.tensor([0, 0]), torch.float32), wanted.expand(2, -1))
    assert torch.equal(unpacked(Workspace(device), on(held, device), torch.float32).cpu(), wanted)
