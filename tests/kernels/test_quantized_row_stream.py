"""Products of one to four rows with a large weight of packed integers on Hopper: what is compiled, where no GPU can
run it, and what of the rows fits into shared memory.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compiled import SHARED_BYTES, run

COMPILE = """
import torch
import kernels.linear.quantized_row_stream as stream
from kernels.linear.cases import packed_case
from kernels.linear.packed_dispatch import few_rows_stream_tile, row_stream_tile
from kernels.testing import seeded
from tests.compiled import launching

stream.multiprocessors = lambda device: 132
cpu, bf16 = torch.device("cpu"), torch.bfloat16
generator = seeded(cpu)
counts, wanted = torch.zeros(512, dtype=torch.int32), []
with launching() as (workspace, kernels):
    for act, k in ((None, 14336), ("silu", 4096)):
        for zeros, rows in ((False, 1), (True, 1), (True, 2), (False, 3)):
            fused = {"norm": act is not None, "residual": act is None, "activation": act}
            made = packed_case("", bf16, rows, 4096, k, 4, 128, zeros=zeros, **fused).make(cpu, generator)
            normed = made["norm_weight"], 1e-6, 0.0
            tile = row_stream_tile(act is not None)
            if rows > 1:
                tile = few_rows_stream_tile(made["weight"].shape, act is not None, rows, 132)
                normed = None, *normed[1:]
            stream.packed_row_stream(
                workspace, made["x"], made["weight"], None, *normed, made["residual"], act, tile, counts
            )
            # eight instructions for a block of 128 inputs and 16 outputs, however many rows, and none for their sums
            count = 8 * (tile.inputs // 128) * (2 if act else 1) * (tile.outputs // 16 // tile.warps)
            wanted.append((count, tile.programs))
for kernel, (count, programs) in zip(kernels, wanted, strict=True):
    text = kernel.asm["ptx"]
    print(text.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == count, end=" ")
    # weights are asked for before the kernel before has finished, and nothing is subtracted from each of them
    print(text.index("cp.async.bulk.tensor") < text.index("griddepcontrol.wait"), end=" ")
    print("sub.bf16x2" not in text, kernel.metadata.shared, programs)
"""


@pytest.mark.slow
def test_integers_are_multiplied_by_their_bits_alone(tmp_path: Path) -> None:
    for said in run(COMPILE, tmp_path).splitlines():
        *held, shared, programs = said.split()
        assert held == ["True"] * 3
        # with what each program of a multiprocessor has beside its own
        assert SHARED_BYTES // (int(shared) + 1024) >= int(programs)


def test_a_weight_is_taken_in_whole_tiles_and_blocks() -> None:
    from kernels.linear.cases import packed_int
    from kernels.linear.packed_dispatch import row_stream_tile
    from kernels.linear.quantized_row_stream import whole_tiles

    cpu = torch.device("cpu")
    generator = torch.Generator(cpu).manual_seed(0)
    for shape, activation, taken in (
        ((128, 512), None, True),
        ((128, 512), "silu", True),
        ((192, 512), None, True),
        ((192, 512), "silu", False),
        ((128, 640), None, False),
    ):
        weight = packed_int(generator, cpu, shape, 4, 128)
        assert whole_tiles(weight.shape, activation is not None, row_stream_tile(activation is not None)) == taken


@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize(("shape", "gated"), [((28672, 4096), True), ((4096, 14336), False), ((51200, 5120), True)])
def test_programs_hold_their_part_of_the_rows_beside_a_ring(shape: tuple[int, int], gated: bool, rows: int) -> None:
    from kernels.linear.packed_dispatch import few_rows_stream_tile
    from kernels.sizes import next_power_of_2

    tile = few_rows_stream_tile(shape, gated, rows, 132)
    assert tile is not None
    assert tile.stages >= 2
    ring = tile.stages * tile.outputs * tile.inputs // 2 * (2 if gated else 1)
    held = tile.units(shape, gated, 132) * tile.inputs * 2 * next_power_of_2(rows)
    # what the last program has, which takes as much as any
    tiles, slices = shape[0] // tile.outputs // (2 if gated else 1), shape[1] // tile.inputs
    units = tiles * slices
    programs = min(units, 132 * tile.programs)
    most = max((one + 1) * units // programs - one * units // programs for one in range(programs))
    assert tile.units(shape, gated, 132) == min(most, slices)
    assert tile.programs * (ring + held + 1024) <= 233472


def test_a_program_meets_no_more_of_a_row_than_there_is() -> None:
    from kernels.linear.quantized_row_stream import RowStreamTile

    tile = RowStreamTile(64, 512, 2, 4)
    assert tile.units((64 * 4096, 1024), False, 132) == 2
    assert tile.units((64, 1024), False, 132) == 1
    assert tile.fitting((16384, 53248), False, 4, 132) is None
