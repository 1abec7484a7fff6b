"""Blocks of GGUF files stand for the numbers that the gguf package reads them as."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine import gguf_file
from kernels.weight import GgufBlocks
from kernels.weight.gguf import CHUNK, FORMATS, dequantize
from tests.gguf_blocks import blocks


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
    assert CHUNK >= 1 << 20


def test_a_table_gives_its_matrices() -> None:
    first, second = blocks("Q5_K", 6, 1), blocks("IQ4_XS", 6, 1)
    table = GgufBlocks((first.view(2, 3, -1), second.view(2, 3, -1)), ("Q5_K", "IQ4_XS"), 256)
    assert table.shape == (2, 6, 256)
    wanted = torch.cat((dequantize(first[3:], "Q5_K"), dequantize(second[3:], "IQ4_XS")))
    assert torch.equal(table.matrix(1).dense(torch.float32), wanted)
    assert torch.equal(table.dense(torch.float32)[1], wanted)
