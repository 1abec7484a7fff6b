"""Blocks of GGUF files stand for the numbers that the gguf package reads them as."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine import gguf_file
from kernels.weight import GgufBlocks
from kernels.weight.gguf import FORMATS, dequantize
from tests.compiled import SHARED_BYTES, run
from tests.gguf_blocks import blocks

COMPILE = """
from collections import Counter
import torch
import triton
from kernels.workspace import Workspace
from kernels.compilation.ahead import Compiler
from kernels.embedding import kernel as embedding
from kernels.linear import gguf, gguf_rows
from kernels.linear.cases import gguf_case
from kernels.linear.gguf_cases import gguf_weight
from kernels.moe_gemm import gguf as experts
from kernels.moe_gemm.cases import gguf_case as experts_case
from kernels.testing import seeded
from kernels.weight.gguf import FORMATS
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
    for name in FORMATS:
        for rows in (1, 3, 16):
            gguf.linear(workspace, **gguf_case("", bf16, rows, 96, 256, name, residual=True).make(cpu, generator))
    gguf.linear(workspace, **gguf_case("", bf16, 12, 96, 256, "Q4_K", activation="silu").make(cpu, generator))
    table = gguf_weight(generator, cpu, (96, 256), {"Q6_K": 96})
    gguf_rows.unpacked(workspace, table, bf16)
    for count in (1, 5):
        embedding.embedding(workspace, torch.zeros(count, dtype=torch.int32), table, bf16, 16.0)
    for formats in ("Q4_K Q4_K Q6_K", "IQ4_XS Q5_K Q8_0"):
        experts.moe_gemm(workspace, **experts_case("", bf16, 4, 256, 256, 16, 4, formats).make(cpu, generator))
print(*(f"{name}:{compiled[name]}" for name in sorted(compiled)), max(shared))
"""


@pytest.mark.slow
def test_compiles_for_hopper_once_for_all_rows_of_a_tile(tmp_path: Path) -> None:
    *counts, shared = run(COMPILE, tmp_path).split()
    wanted = {"gguf_kernel": len(FORMATS) + 1, "numbers_kernel": 2, "gguf_up": 2, "gguf_down": 2}
    assert {name: int(count) for name, count in (each.split(":") for each in counts)}.items() >= wanted.items()
    assert int(shared) <= SHARED_BYTES


def test_formats_are_those_that_files_are_read_with() -> None:
    read = {block.name: (block.num_values, block.num_bytes) for block in gguf_file.FORMATS.values()}
    assert {name: (block.num_values, block.num_bytes) for name, block in FORMATS.items()} == read
    sizes = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in FORMATS}
    assert sizes == read


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_package(name: str) -> None:
    data = blocks(name, 7, 3)
    wanted = quants.dequantize(data.numpy(), GGMLQuantizationType[name])
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(dequantize(data, name).numpy(), wanted, rtol=1e-6, atol=1e-7)


def mixed(inputs: int = 512) -> GgufBlocks:
    names = ("Q4_K", "Q6_K", "F16", "Q8_0")
    rows = (5, 3, 2, 4)
    parts = tuple(blocks(name, n, inputs // FORMATS[name].num_values, n) for name, n in zip(names, rows, strict=True))
    return GgufBlocks(parts, names, inputs)


def test_rows_in_several_formats_are_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = mixed()
    dense = weight.dense(torch.float32)
    assert weight.shape == dense.shape == (14, 512)
    assert weight.nbytes == 5 * 288 + 3 * 420 + 2 * 1024 + 4 * 544
    ids = torch.tensor([13, 0, 4, 5, 7, 8, 9, 10], dtype=torch.int32)
    assert torch.equal(weight.rows(ids, torch.float32), dense[ids.long()])
    x, bias = torch.randn(3, 512), torch.randn(14)
    wanted = x.double() @ dense.double().T + bias
    # Of the size of what is summed up.
    close = 1e-6 * (x.abs() @ dense.abs().T + bias.abs())
    assert bool(((weight.product(x, bias) - wanted).abs() <= close).all())
    # Cut into runs of two rows, and each row of x by itself.
    monkeypatch.setattr("kernels.weight.gguf.CHUNK", 1024)
    assert bool(((weight.product(x, bias) - wanted).abs() <= close).all())
    alone = torch.cat([weight.product(row[None], bias, deterministic=True) for row in x])
    assert torch.equal(weight.product(x, bias, deterministic=True), alone)


def test_a_table_gives_its_matrices() -> None:
    first, second = blocks("Q5_K", 6, 1), blocks("IQ4_XS", 6, 1)
    table = GgufBlocks((first.view(2, 3, -1), second.view(2, 3, -1)), ("Q5_K", "IQ4_XS"), 256)
    assert table.shape == (2, 6, 256)
    wanted = torch.cat((dequantize(first[3:], "Q5_K"), dequantize(second[3:], "IQ4_XS")))
    assert torch.equal(table.matrix(1).dense(torch.float32), wanted)
    assert torch.equal(table.dense(torch.float32)[1], wanted)
