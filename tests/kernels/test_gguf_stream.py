"""Products of 5 to 64 rows with blocks of GGUF files: what instructions make of every format's bits and scales, that
their places are those of the rows' inputs, which kernel is chosen, and what is compiled, where no GPU can run it.

Results are held by the cases of `linear` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.linear import gguf_operand, gguf_scaled, gguf_stream
from kernels.linear.gguf_dispatch import DISPATCH, GgufProblem, stream_tile
from kernels.weight.gguf import FORMATS, dequantize
from tests.compiled import SHARED_BYTES, run
from tests.kernels.ptx import execute
from tests.kernels.test_gguf_vector import unit, word

NAME, SCALE, ADDED = "Q4_K", 0.0123, -0.0456
COMPILE = """
import torch
import kernels.linear.gguf_stream as stream
from kernels.linear.cases import gguf_case
from kernels.linear.gguf_dispatch import stream_tile
from kernels.linear.skinny import counters
from kernels.testing import seeded
from tests.compiled import launching

stream.multiprocessors = lambda device: 132
cpu, generator = torch.device("cpu"), seeded(torch.device("cpu"))
with launching() as (workspace, kernels):
    for rows, act, dtype in ((8, None, torch.bfloat16), (64, "silu", torch.bfloat16), (64, None, torch.float16)):
        made = gguf_case("", dtype, rows, 128, 2048, "Q4_K", activation=act).make(cpu, generator)
        tile = stream_tile(rows, act is not None)
        part = made["weight"].parts[0]
        stream.gguf_stream(workspace, made["x"], part, None, None, act, tile, counters(workspace))
for kernel in kernels:
    print(kernel.asm["ptx"].count("mma.sync.aligned.m16n8k16"), kernel.metadata.shared)
"""


def factors(group: int, dtype: torch.dtype) -> int:
    """The word of a scale and of what is added, as `store_factors` makes it."""
    lower = dtype == torch.bfloat16
    raised = 2.0 ** (69 - gguf_scaled.place(NAME, group)) if lower else 1.0
    two = torch.tensor([SCALE * raised, ADDED / 2.0**64 if lower else ADDED]).to(dtype)
    return int(two.view(torch.int32)) & 0xFFFFFFFF


def numbers(data: torch.Tensor, group: int, thread: int, dtype: torch.dtype) -> dict[int, float]:
    """Of one of the four threads of a row: input of the group → number with its scale."""
    low, lower = gguf_operand.FORMS[NAME].low, dtype == torch.bfloat16
    words = [word(data, low.chunks[low.chunk[group]], index) for index in (2 * thread, 2 * thread + 1)]
    words += [factors(group, dtype)] * 2
    text = gguf_scaled.scaled_asm(NAME, group, lower)
    registers = execute(text, {4 + place: held for place, held in enumerate(words)})
    made: dict[int, float] = {}
    for step in range(2):
        for h in range(2):
            for half in range(2):
                bits = registers[2 * step + h] >> 16 * half & 0xFFFF
                number = torch.tensor([bits - (1 << 16 if bits >> 15 else 0)], dtype=torch.int16).view(dtype).item()
                made[8 * thread + 4 * step + 2 * h + half] = number * (2.0**64 if lower else 1.0)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_become_scaled_numbers_of_their_inputs(dtype: torch.dtype) -> None:
    data = unit(NAME, torch.Generator().manual_seed(5))
    held = dequantize(data, NAME).view(8, 32)
    scale, added = (torch.tensor(number).to(dtype).float() for number in (SCALE, ADDED))
    for group in range(8):
        got: dict[int, float] = {}
        for thread in range(4):
            got |= numbers(data, group, thread, dtype)
        # Rounded once.
        assert [got[at] for at in range(32)] == (held[group] * scale + added).to(dtype).float().tolist()


def test_a_box_holds_the_chunks_of_a_unit_in_their_order() -> None:
    chunks = gguf_operand.FORMS[NAME].low.chunks
    held = [at + half + byte for at, apart in chunks for half in (0, apart) for byte in range(16)]
    start = gguf_stream.START.value
    assert held == list(range(start, start + gguf_stream.BITS.value))
    assert start % 16 == FORMATS[NAME].num_bytes % 16 == 0, "boxes begin on 16 bytes"


@pytest.mark.parametrize("gated", [False, True])
def test_a_ring_has_two_stages_at_least(gated: bool) -> None:
    for rows in (8, 16, 32, 64):
        assert stream_tile(rows, gated).fitting(1 + gated) >= 2


def test_four_to_64_rows_are_columns() -> None:
    some = GgufProblem(8, (4096,), 4096, False, False, vector=True, stream=True, narrow=True)
    assert DISPATCH.choose(some).name == "stream"
    assert DISPATCH.choose(some._replace(rows=64, gated=True, vector=False)).name == "stream"
    assert DISPATCH.choose(some._replace(deterministic=True)).name == "tiles"
    assert DISPATCH.choose(some._replace(stream=False)).name == "vector"


def test_what_no_kernel_streams_is_written_out_from_17_rows_on() -> None:
    others = GgufProblem(16, (4096,), 4096, False, False, narrow=True)
    assert DISPATCH.choose(others).name == "tiles"
    assert DISPATCH.choose(others._replace(rows=17)).name == "written_out"
    assert DISPATCH.choose(others._replace(rows=64, narrow=False)).name == "tiles"


@pytest.mark.slow
def test_compiles_for_hopper_without_an_exchange_and_within_its_memory(tmp_path: Path) -> None:
    """Layouts that need an exchange are refused while it is compiled."""
    said = [[int(number) for number in one.split()] for one in run(COMPILE, tmp_path).splitlines()]
    # Two instructions a group of inputs, eight rows and block of outputs.
    assert [count for count, _ in said] == [16, 16 * 8 * 2, 16 * 8]
    assert max(shared for _, shared in said) <= SHARED_BYTES
