"""Products of one row with 8-bit floats on Hopper: what is compiled, where no GPU can run it.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compiled import SHARED_BYTES, run

COMPILE = """
import torch
import kernels.linear.fp8_row_stream as stream
from kernels.linear.cases import fp8_case
from kernels.linear.fp8_dispatch import row_stream_tile
from kernels.testing import seeded
from kernels.weight.inputs import Inputs
from tests.compiled import launching

stream.multiprocessors = lambda device: 132
cpu, bf16 = torch.device("cpu"), torch.bfloat16
generator = seeded(cpu)
counts, wanted = torch.zeros(512, dtype=torch.int32), []
with launching() as (workspace, kernels):
    for act, k, limit in ((None, 14336, None), ("silu", 4096, None), ("silu", 4096, 10.0)):
        fused = {"norm": act is not None, "residual": act is None, "activation": act}
        made = fp8_case("", bf16, 1, 4096, k, (128, 128), Inputs("fp8", 128), **fused).make(cpu, generator)
        normed = made["norm_weight"], 1e-6, 0.0
        tile = row_stream_tile(act is not None)
        stream.fp8_row_stream(
            workspace, made["x"], made["weight"], None, *normed, made["residual"], act, tile, counts, limit
        )
        # four instructions for a block of 128 inputs and 64 outputs
        count = 4 * (tile.inputs // 128) * (2 if act else 1) * (tile.outputs // 64)
        wanted.append((count, tile.programs))
for kernel, (count, programs) in zip(kernels, wanted, strict=True):
    text = kernel.asm["ptx"]
    print(text.count("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3") == count, end=" ")
    # weights are asked for before the kernel before has finished, and none is converted
    print(text.index("cp.async.bulk.tensor") < text.index("griddepcontrol.wait"), end=" ")
    print("f16x2.e4m3x2" not in text, kernel.metadata.name, kernel.metadata.shared, programs)
"""


@pytest.mark.slow
def test_weights_are_multiplied_where_they_stand_in_shared_memory(tmp_path: Path) -> None:
    said = run(COMPILE, tmp_path).splitlines()
    assert len(said) == 3, "one launch each: none quantizes the row before"
    for text in said:
        *held, name, shared, programs = text.split()
        assert held == ["True"] * 3
        assert name == "fp8_row_stream_kernel"
        # with what each program of a multiprocessor has beside its own
        assert SHARED_BYTES // (int(shared) + 1024) >= int(programs)


def test_a_tile_of_blocks_has_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.linear import fp8_row_stream
    from kernels.weight import Fp8
    from kernels.weight.inputs import Inputs

    monkeypatch.setattr(fp8_row_stream, "group_products", lambda device: True)
    x = torch.zeros(1, 256, dtype=torch.bfloat16)

    def taken(rows: int, block: tuple[int, int], gated: bool = False, **inputs: object) -> bool:
        data = torch.zeros(rows, 256, dtype=torch.float8_e4m3fn)
        scale = torch.ones(-(-rows // block[0]), -(-256 // block[1]))
        weight = Fp8(data, scale, block, Inputs(**{"number": "fp8", **inputs}))  # type: ignore[arg-type]
        return fp8_row_stream.row_streams_fp8(x, weight, gated)

    assert taken(200, (128, 128), group=128)
    assert taken(512, (128, 128), gated=True, group=128)
    assert not taken(400, (128, 128), gated=True, group=128), "rows of up would have two scales"
    assert not taken(512, (128, 128), gated=True), "inputs with a scale a row"
    assert not taken(512, (1, 256))
    assert not taken(512, (1, 128), group=128)
    assert not taken(512, (128, 128), group=128, scale=torch.tensor(0.1))
    assert not taken(512, (128, 128), group=128, largest=1.5)
    assert not taken(512, (128, 128), number=None)


def test_a_row_whose_activation_clips_streams_where_one_that_does_not_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.gated_mlp.dispatch import clips_row
    from kernels.linear import fp8_row_stream
    from kernels.weight import Dense, Fp8
    from kernels.weight.inputs import Inputs

    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    data, scale = torch.zeros(512, 256, dtype=torch.float8_e4m3fn), torch.ones(4, 2)
    weight = Fp8(data, scale, (128, 128), Inputs("fp8", 128))
    assert not clips_row(x, weight, 10.0), "no Hopper"
    monkeypatch.setattr(fp8_row_stream, "group_products", lambda device: True)
    assert clips_row(x, weight, 10.0)
    assert not clips_row(x, weight, None)
    assert not clips_row(x.repeat(2, 1), weight, 10.0)
    assert not clips_row(x, Dense(data.bfloat16()), 10.0)
    assert not clips_row(torch.zeros(1, 32768, dtype=torch.bfloat16), weight, 10.0)
