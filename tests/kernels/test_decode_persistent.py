"""The Gluon attention of decode sequences: that it compiles for Hopper where no GPU can run it, for caches of
16 and of 8 bits, and which sequences take it.

Its results are held by the cases of `paged_attention` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.paged_attention.decode_persistent import BLOCK, HELD, PROGRAMS, REGISTERS, STAGES, decode_persistent_kernel
from tests.compiled import box, for_hopper

for groups in (4, 8):
    constants = {
        "H": 32, "G": groups, "GROUP": 32 // groups, "SEQS": 128, "STAGES": STAGES, "PDL": True,
    }
    kinds = {
        "q_desc": box(HELD.value, 64), "k_desc": box(BLOCK.value, 64), "v_desc": box(BLOCK.value, 64), "p_out": "*bf16",
        "p_partials": "*fp32", "p_sums": "*fp32", "scale": "fp32",
    }
    made = for_hopper(
        decode_persistent_kernel, constants, lambda name: kinds.get(name, "*i32" if name.startswith("p_") else "i32"),
        maxnreg=REGISTERS,
    )
    ptx, ttgir = made.asm["ptx"], made.asm["ttgir"]
    assert "wgmma.mma_async.sync.aligned.m64n8k16" in ptx and "cp.async.bulk.tensor.2d" in ptx
    assert "setmaxnreg" in ptx, "the asking warp gives its registers away"
    assert ttgir.count("iter_args(%turn") == 3, "Triton took where the ring stands for a constant"
    print(made.metadata.shared * PROGRAMS)
"""


FP8 = """
from kernels.paged_attention.decode_persistent import BLOCK, HELD, REGISTERS, STAGES
from kernels.paged_attention.decode_persistent_fp8 import PROGRAMS, WIDTH, decode_persistent_fp8_kernel
from tests.compiled import box, for_hopper

for groups in (4, 8):
    constants = {
        "H": 32, "G": groups, "GROUP": 32 // groups, "SEQS": 128, "STAGES": STAGES, "PDL": True,
    }
    read = box(BLOCK.value, WIDTH.value, fp8=True)
    kinds = {
        "q_desc": box(HELD.value, 64), "k_desc": read, "v_desc": read, "p_out": "*bf16", "p_partials": "*fp32",
        "p_sums": "*fp32", "scale": "fp32", "v_scale": "fp32",
    }
    made = for_hopper(
        decode_persistent_fp8_kernel, constants,
        lambda name: kinds.get(name, "*i32" if name.startswith("p_") else "i32"),
        maxnreg=REGISTERS,
    )
    ptx, ttgir = made.asm["ptx"], made.asm["ttgir"]
    assert "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16" in ptx and "cp.async.bulk.tensor.2d" in ptx
    assert "cvt.rn.f16x2.e4m3x2" in ptx, "one instruction makes two halves"
    assert "setmaxnreg" in ptx, "the asking warp gives its registers away"
    assert ttgir.count("iter_args(%turn") == 3, "Triton took where the ring stands for a constant"
    print(made.metadata.shared * PROGRAMS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [COMPILE, FP8], ids=["16 bits", "8 bits"])
def test_compiles_for_hopper(program: str, tmp_path: Path) -> None:
    assert all(0 < int(size) < SHARED_BYTES for size in run(program, tmp_path).split())


def test_sequences_that_stream() -> None:
    from kernels.paged_attention.dispatch import streamed

    def taken(group: int, kv_heads: int, alone: bool = True) -> list[int]:
        return [seqs for seqs in range(1, 300) if streamed(group, kv_heads, seqs, alone)]

    assert taken(4, 8) == taken(8, 4) == list(range(16, 129))
    assert not taken(4, 8, alone=False), "prompts beside them need shared memory"
    assert not taken(2, 8), "not timed"
