"""Products of few rows with packed integers and 8-bit floats on Hopper: the order of inputs in an operand, and that
every tile compiles where there is no GPU to run it.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiled import SHARED_BYTES, run

COMPILE = """
import torch
import kernels.linear.quantized_stream as stream
from kernels.linear import fp8_dispatch as fp8, packed_dispatch as packed
from kernels.linear.cases import fp8_case, packed_case
from kernels.testing import seeded
from kernels.weight.inputs import Inputs
from tests.compiled import launching

stream.multiprocessors = lambda device: 132
cpu, bf16 = torch.device("cpu"), torch.bfloat16
generator = seeded(cpu)
counts = torch.zeros(512, dtype=torch.int32)
with launching() as (workspace, kernels):
    for rows in (8, 32, 64):
        for act in (None, "silu"):
            case = packed_case("", bf16, rows, 256, 640, 4, 128, zeros=True, residual=act is None, activation=act)
            made = case.make(cpu, generator)
            tile = packed.stream_tile(rows, 512 if act else 256, act is not None, 132)
            stream.packed_stream(workspace, made["x"], made["weight"], None, made["residual"], act, tile, counts)
            case = fp8_case("", bf16, rows, 256, 640, (128, 128), Inputs("fp8", 128), activation=act)
            weight = case.make(cpu, generator)["weight"]
            x, scales = torch.zeros(rows, 640).to(torch.float8_e4m3fn), torch.ones(rows, 5)
            tile = fp8.stream_tile(rows, act is not None)
            stream.fp8_stream(workspace, x, scales, weight, None, None, act, tile, counts, bf16)
    for n in (256, 1 << 15):
        case = packed_case("", bf16, 100, n, 640, 4, 128, bias=True)
        made, tile = case.make(cpu, generator), packed.stream_tile(100, n, False, 132)
        stream.packed_stream(workspace, made["x"], made["weight"], made["bias"], None, None, tile, counts)
texts = [kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name == "quantized_stream_kernel"]
assert len(texts) == 12
assert all(text.index("cp.async.bulk.tensor") < text.index("griddepcontrol.wait") for text in texts)
print(sum("mma.sync.aligned.m16n8k16.row.col.f32.bf16" in text for text in texts))
print(*(sum(f"m64n{n}k16.f32.bf16" in text for text in texts) for n in (64, 128)))
print(sum("k32.f32.e4m3.e4m3" in text for text in texts))
"""


@pytest.mark.slow
def test_few_rows_are_multiplied_from_registers_and_8_bit_floats_as_they_are(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path).split() == ["2", "2", "2", "4"]


def ring_bytes(tile: Any, packed_weight: bool, activation: bool) -> int:
    """Shared memory of a program's ring."""
    from kernels.linear.quantized_stream import WIDTH

    weights = tile.outputs * (2 if activation else 1) * (64 if packed_weight else 128)
    return tile.stages * (tile.inputs // WIDTH) * (weights + tile.rows * (256 if packed_weight else 128))


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128])
def test_programs_of_a_product_fill_every_multiprocessor_alike(rows: int, activation: bool) -> None:
    """Where more of them fit than are meant for one, some multiprocessors would get one more than others, and programs
    of the next product would take memory from these."""
    from kernels.linear import fp8_dispatch as fp8
    from kernels.linear import packed_dispatch as packed

    for module in (packed, fp8):
        if module is fp8 and not fp8.SPLIT_ROWS < rows <= fp8.FEW_ROWS:
            continue
        inside = activation and rows <= packed.GATED_ROWS
        for n in (1 << 12, 1 << 15):
            tile = packed.stream_tile(rows, n, inside, 132) if module is packed else fp8.stream_tile(rows, inside)
            held = ring_bytes(tile, module is packed, inside)
            assert SHARED_BYTES // (held + 2048) == tile.programs, (module.__name__, tile, held)


def test_rows_are_ordered_as_a_weight_is_unpacked() -> None:
    """A thread has 16 bytes of a row. Of two neighbouring bytes, the low halves stand in a register, then the high
    ones; four threads of a row follow each other, two places each."""
    from kernels.linear.quantized_stream import FEW_ROWS, WIDTH, order_inputs
    from kernels.testing import workspace

    device = workspace().device
    x = torch.arange(FEW_ROWS * 2 * WIDTH, dtype=torch.float32, device=device).view(FEW_ROWS, 2 * WIDTH)
    places = [
        block * WIDTH + 2 * (16 * quarter + 2 * pair + byte) + half
        for block in range(2)
        for pair in range(8)
        for half in range(2)
        for quarter in range(4)
        for byte in range(2)
    ]
    assert torch.equal(order_inputs(workspace(), x, None), x[:, places])
    order = torch.randperm(2 * WIDTH, device=device, dtype=torch.int32)
    assert torch.equal(order_inputs(workspace(), x, order), x[:, order.long()][:, places])
