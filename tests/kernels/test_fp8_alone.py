"""Products of a few pairs with experts of 8-bit floats on Hopper: how they are cut, how blocks, scales and tiles are
numbered, and what is compiled, where no GPU can run it.

Results are held by the cases of `moe_gemm` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.warmup import warmup_steps
from kernels.hopper.schedule import SHARED_BYTES
from kernels.moe_gemm import fp8_alone
from kernels.moe_gemm.alone_cut import ALONE_PAIRS, HEIGHT, MAX_SPLITS, UNIT, WIDTH, AloneCut, fp8_cut
from kernels.moe_gemm.cases import w8a8_case
from kernels.sizes import cdiv
from kernels.testing import seeded, workspace
from kernels.weight import Fp8
from kernels.weight.inputs import Inputs, quantize
from kernels.weight.inputs import quantized as rounded
from tests.compiled import run

COMPILE = """
import torch
from kernels.moe_gemm import fp8_alone
from kernels.moe_gemm.cases import w8a8_case
from kernels.testing import seeded
from kernels.weight.inputs import Inputs
from tests.compiled import launching

fp8_alone.multiprocessors = lambda device: 132
cpu, bf16, square, group = torch.device("cpu"), torch.bfloat16, (128, 128), Inputs("fp8", 128)
generator = seeded(cpu)
names = ("x", "gate_up", "down", "weights", "experts", "residual", "activation", "limit", "biases")
with launching() as (workspace, kernels):
    for case in (
        w8a8_case("", bf16, 1, 2048, 768, 8, 8, group, square),
        w8a8_case("", bf16, 4, 2048, 768, 8, 8, group, square),
        w8a8_case("", bf16, 2, 320, 192, 6, 4, group, (1, 128), biased=True, activation="swiglu_oai", limit=1.0),
        w8a8_case("", bf16, 2, 320, 192, 6, 4, Inputs("fp8")),
    ):
        given = {"activation": "silu", "limit": None, "biases": None, **case.make(cpu, generator)}
        fp8_alone.fp8_alone_moe(workspace, *(given[name] for name in names))
for kernel in kernels:
    text = kernel.asm["ptx"]
    if kernel.metadata.name == "fp8_alone_kernel":
        early = text.index("cp.async.bulk.tensor") < text.index("griddepcontrol.wait")
        count = text.count("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3")
        print("kernel", early, count, "f16x2.e4m3x2" not in text, kernel.metadata.shared)
    else:
        print(kernel.metadata.name)
"""


@pytest.mark.slow
def test_weights_are_multiplied_where_they_stand_and_down_asks_for_them_early(tmp_path: Path) -> None:
    said = [text.split() for text in run(COMPILE, tmp_path).splitlines()]
    products = [text for text in said if text[0] == "kernel"]
    assert {text[0] for text in said} == {"kernel", "combine"}, "no launch quantizes"
    # four tokens have the down of one token
    early = ["False", "True", "False", "False", "True", "False", "True"]
    assert [text[1] for text in products] == early, "up knows its experts behind the wait"
    assert all(text[2:4] == ["8", "True"] for text in products), "two blocks of four instructions, nothing converted"
    assert (int(products[0][4]) + 1024) * 3 <= SHARED_BYTES, "three programs of the model's up a multiprocessor"
    assert (int(products[1][4]) + 1024) * 2 <= SHARED_BYTES, "two of its down"


@pytest.mark.parametrize(
    ("columns", "tokens", "k", "inputs", "cut"),
    [
        pytest.param(24, 1, 8, 2048, AloneCut(2, 4), id="Qwen3-30B-A3B, up: all weights are asked for at once"),
        pytest.param(32, 1, 8, 768, AloneCut(1, 3), id="its down"),
        pytest.param(24, 2, 8, 2048, AloneCut(1, 4), id="two tokens: three programs a multiprocessor"),
        pytest.param(24, 4, 8, 2048, AloneCut(1, 3), id="four tokens: four"),
        pytest.param(64, 1, 8, 7168, AloneCut(1, 4), id="DeepSeek-V3, up: three programs have more than four"),
        pytest.param(224, 1, 8, 2048, AloneCut(1, 3), id="its down"),
        pytest.param(6, 1, 4, 4160, AloneCut(4, 5), id="four programs a tile at most"),
    ],
)
def test_programs_and_stages_fill_shared_memory(columns: int, tokens: int, k: int, inputs: int, cut: AloneCut) -> None:
    assert fp8_cut(columns, tokens, k, inputs, 2, multiprocessors=132) == cut


@given(st.integers(1, 256), st.integers(1, 32), st.integers(1, 256), st.sampled_from((0, 2, 4, 64)), st.data())
def test_a_cut_fits_and_is_one_of_a_warmup_step(
    columns: int, k: int, boxes: int, scales: int, data: st.DataObject
) -> None:
    inputs = 64 * boxes
    tokens = data.draw(st.integers(1, max(1, ALONE_PAIRS // k)))
    cut = fp8_cut(columns, tokens, k, inputs, scales, 132)
    units = cdiv(inputs, UNIT)
    longest = max((split + 1) * units // cut.splits - split * units // cut.splits for split in range(cut.splits))
    assert cut.splits <= MAX_SPLITS
    assert 1 <= cut.stages <= longest
    assert cut.held(inputs) % 8 == 0
    assert cut.held(inputs) * WIDTH >= longest * UNIT
    held = cut.stages * HEIGHT * UNIT + cut.held(inputs) * (WIDTH + 32 + 4 * scales) + 8 * cut.stages
    assert held <= SHARED_BYTES - 1024
    steps = [step.tokens for step in warmup_steps(256, 8192, 8192)]
    assert cut in {fp8_cut(columns, step, k, inputs, scales, 132) for step in steps if step * k <= ALONE_PAIRS}


def played(x: torch.Tensor, weight: Fp8, expert: int, cut: AloneCut, gated: bool) -> torch.Tensor:
    """What `fp8_alone_kernel` sums up for a row x [1, K] and an expert, tile by tile: [columns, HEIGHT]."""
    _, rows, inputs = weight.shape
    outputs, out = (rows // 2, HEIGHT // 2) if gated else (rows, HEIGHT)
    units, held, runs = cdiv(inputs, UNIT), cut.held(inputs), fp8_alone.runs_of(weight)
    matrix = torch.zeros(rows, units * UNIT)
    matrix[:, :inputs] = weight.data[expert].float()
    numbers, scales = quantize(x, weight.inputs)
    row = torch.zeros(units * UNIT + held * WIDTH)
    row[:inputs] = numbers[0].float()
    tiles = []
    for column in range(outputs // out):
        local = torch.arange(HEIGHT)
        local = column * out + local % out + local // out * outputs
        total = torch.zeros(HEIGHT)
        for split in range(cut.splits):
            begin, stop = split * units // cut.splits, (split + 1) * units // cut.splits
            acc = torch.zeros(HEIGHT, 8)
            boxes = row[2 * begin * WIDTH :][: held * WIDTH].reshape(held // 8, 8, WIDTH)
            for place in range(2 * (stop - begin)):
                group = min(2 * begin + place, scales.shape[1] - 1)
                own = torch.zeros(8)
                own[place % 8] = scales[0, group]
                run = local[:: HEIGHT // runs]
                block = min(2 * begin + place, weight.scale.shape[-1] - 1)
                by_run = weight.scale[expert, run // weight.block[0], block]
                box = matrix[local, (2 * begin + place) * WIDTH :][:, :WIDTH]
                acc += box @ boxes[place // 8].T * own * by_run.repeat_interleave(HEIGHT // runs)[:, None]
            total += acc.sum(1)
        tiles.append(total)
    return torch.stack(tiles)


@pytest.mark.parametrize("block", [(128, 128), (48, 128), (1, 128)])
@pytest.mark.parametrize(("inputs", "splits", "gated"), [(320, 1, True), (2112, 2, False), (2176, 4, True)])
def test_blocks_and_scales_are_numbered_as_the_product_is(
    block: tuple[int, int], inputs: int, splits: int, gated: bool
) -> None:
    cpu = torch.device("cpu")
    case = w8a8_case("", torch.bfloat16, 1, inputs, 192, 2, 1, Inputs("fp8", 128), block)
    made = case.make(cpu, seeded(cpu))
    weight = made["gate_up"]
    sums = played(made["x"], weight, 1, AloneCut(splits, 2), gated)
    wanted = (rounded(made["x"], weight.inputs) @ weight.matrix(1).dense(torch.float32).T)[0]
    if gated:
        # gate and up of a tile stand one behind the other
        wanted = wanted.reshape(2, -1, HEIGHT // 2).transpose(0, 1)
    torch.testing.assert_close(sums, wanted.reshape(sums.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("hidden", "change", "taken"),
    [
        (256, {}, True),
        (224, {}, False),
        (256, {"block": (1, 128)}, True),
        (256, {"inputs": Inputs("fp8")}, True),
        (256, {"inputs": Inputs("fp8", 32, True)}, False),
        (256, {"inputs": Inputs()}, False),
        (16448, {}, False),
    ],
)
def test_it_takes_whole_boxes_and_inputs_with_scales_of_128_or_of_all(
    monkeypatch: pytest.MonkeyPatch, hidden: int, change: dict[str, Any], taken: bool
) -> None:
    monkeypatch.setattr(fp8_alone, "group_products", lambda device: True)
    cpu = torch.device("cpu")
    about: dict[str, Any] = {"inputs": Inputs("fp8", 128), "block": (128, 128), **change}
    made = w8a8_case("", torch.bfloat16, 1, hidden, 64, 1, 1, **about).make(cpu, seeded(cpu))
    assert fp8_alone.alone_fits(made["x"], made["gate_up"], made["down"]) == taken
    assert not fp8_alone.alone_fits(made["x"].float(), made["gate_up"], made["down"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon has no interpreter")
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_it_gives_what_tiles_give_and_the_same_bits_each_time(device: torch.device, tokens: int) -> None:
    from kernels.moe_gemm.quantized import moe_gemm
    from kernels.moe_gemm.quantized_dispatch import DISPATCH

    case = w8a8_case("", torch.bfloat16, tokens, 2048, 768, 16, 4, Inputs("fp8", 128), (128, 128), absent=2)
    made = case.make(device, seeded(device))
    y = moe_gemm(workspace(), **made)
    for _ in range(20):
        assert torch.equal(moe_gemm(workspace(), **made), y)
    with DISPATCH.changed("alone", declines=lambda problem: "off"):
        tiles = moe_gemm(workspace(), **made).float()
    # One bit of h's own rounding moves some of its 8-bit numbers.
    assert float((y.float() - tiles).norm() / tiles.norm()) < 0.02
