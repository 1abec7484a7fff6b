"""The gate of quantized checkpoints: the numbers that they stand for, in float32, against transformers' dequantized
model; and that the gate would see a format that is misread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, WeightsConfig
from engine.quant.formats import layouts
from engine.quant.formats.fp8 import Fp8 as Fp8Format
from engine.quant.formats.packed import PackedInt as PackedFormat
from engine.quant.formats.parts import Parts as PartsFormat
from engine.quant.methods import gptq
from engine.runner import build
from engine.runner.build import build_runner
from engine.weights import transforms
from kernels.repack import reference as repack
from kernels.select import Ops, select
from kernels.weight import Fp8, PackedInt, Parts, packed
from tests.gate.conftest import quick
from tests.gate.families import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V4_BLOCKS,
    GEMMA3,
    GPT_OSS,
    KIMI,
    MISTRAL,
    QWEN3_5,
    QWEN3_MOE,
)
from tests.gate.oracle import Golden, golden
from tests.gate.packings import PACKINGS, Packing, packed_golden
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import Verdict, judge

PLAYED = 6
LLAMA = SHAPES[2]


# Weights have several blocks of 128 on both sides.
WIDE = replace(
    LLAMA,
    name="llama3-wide",
    config={**LLAMA.config, "hidden_size": 320, "num_hidden_layers": 2, "intermediate_size": 384},
)
WIDE_EXPERTS = replace(
    QWEN3_MOE, name="qwen3-moe-wide", config={**QWEN3_MOE.config, "hidden_size": 320, "moe_intermediate_size": 256}
)
WIDE_LATENTS = replace(
    DEEPSEEK_V3,
    name="deepseek-v3-wide",
    config={
        **DEEPSEEK_V3.config,
        "hidden_size": 320,
        "moe_intermediate_size": 384,
        "kv_lora_rank": 192,
        "q_lora_rank": 160,
    },
)
# Shapes that have every packing, and which others are published in which.
EVERY = (SHAPES[0], LLAMA, QWEN3_MOE, DEEPSEEK_V2)
DENSE_ONES = ("ct-fp8-rows", "ct-fp8-tensor-static", "ct-w8a8", "ct-int4-g32", "ct-int4-zeros-order", "ct-nvfp4")
ROUNDED = ("to-fp8", "to-int8", "to-int4")
PUBLISHED = {
    WIDE: ("fp8-blocks-f32", "fp8-blocks-bf16", "ct-fp8-blocks", "modelopt-fp8-pb-wo"),
    WIDE_EXPERTS: ("fp8-blocks-f32", "ct-fp8-blocks", "w4afp8", "ct-mxfp8"),
    WIDE_LATENTS: ("fp8-blocks-f32", "fp8-blocks-bf16", "ct-int4-g32"),
    MISTRAL: (*DENSE_ONES, *ROUNDED, "fp8-tensor-static", "awq", "gptq-v1", "gptq-v1-order"),
    GEMMA3: (*DENSE_ONES, *ROUNDED, "awq", "gptq-v1", "gptq-v2-8-order"),
    KIMI: (*ROUNDED, "fp8-blocks-f32", "ct-int4-experts", "modelopt-nvfp4"),
    DEEPSEEK_V3: (*ROUNDED, "fp8-blocks-f32", "awq", "ct-w8a8", "modelopt-nvfp4", "w4afp8"),
    QWEN3_5: (*ROUNDED, "fp8-blocks-f32", "fp8-blocks-bf16", "ct-fp8-rows", "ct-nvfp4", "awq", "gptq-v1"),
    DEEPSEEK_V4: ROUNDED,
    DEEPSEEK_V4_BLOCKS: ("as-v4-is-published",),
    GPT_OSS: ROUNDED,
}


def cases() -> Iterator[object]:
    for packing in PACKINGS:
        others = [shape for shape, names in PUBLISHED.items() if packing.name in names]
        for shape in others if packing.name == "as-v4-is-published" else (*EVERY, *others):
            marks = pytest.mark.xdist_group(shape.name)
            yield pytest.param(shape, packing, id=f"{packing.name}-{shape.name}", marks=marks)


def truth_of(shape: Shape, packing: Packing, root: Path) -> Golden:
    cache = root / ".cache" / "gate"
    shape = quick(shape)
    return packed_golden(shape, golden(shape, cache), packing, cache)


def play(truth: Golden, shape: Shape, quantize: str | None) -> Verdict:
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=300,
        scheduler=SchedulerConfig(max_rows=12, token_budget=4096),
        cache=CacheConfig(block_size=shape.block_size, num_blocks=4096 // shape.block_size),
        runtime=RuntimeConfig(dtype="float32"),
        weights=WeightsConfig(activations="16bit", quantize=quantize),  # type: ignore[arg-type]
    )
    sequences = truth.sequences[:PLAYED]
    engine = Engine(build_runner(config), config).start()
    try:
        return judge(sequences, EnginePlayer(engine).play(sequences), "float32")
    finally:
        engine.close()


@pytest.mark.parametrize(("shape", "packing"), list(cases()))
def test_weights_are_the_numbers_that_they_stand_for(
    shape: Shape, packing: Packing, pytestconfig: pytest.Config
) -> None:
    truth = truth_of(shape, packing, Path(pytestconfig.rootpath))
    verdict = play(truth, shape, packing.quantize)
    assert verdict.passes("float32"), verdict


@pytest.mark.parametrize("name", ["awq", "gptq-v1-order"])
def test_words_are_repacked_by_the_engines_own_op(
    name: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = next(packing for packing in PACKINGS if packing.name == name)
    truth, calls = truth_of(LLAMA, packing, Path(pytestconfig.rootpath)), []

    def counted(*given: Any) -> Ops:
        ops = select(*given)
        inner = ops.repack
        ops.repack = lambda *given: calls.append(given) or inner(*given)
        return ops

    monkeypatch.setattr(build, "select", counted)
    build_runner(EngineConfig(model=str(truth.folder), max_model_len=300, cache=CacheConfig(num_blocks=64)))
    assert calls


def swapped(data: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.stack((data >> 4, data & 15), dim=-1).flatten(-2)


def without_order(held: Any, parameters: Mapping[str, torch.Tensor], value: Any = PackedFormat.value) -> PackedInt:
    return replace(value(held, parameters), order=None)


def next_scales(self: PackedInt, numbers: torch.Tensor, *given: Any, scaled: Any = PackedInt._scaled) -> torch.Tensor:
    scale, zero = given
    made: torch.Tensor = scaled(self, numbers, scale.roll(1, -1), zero)
    return made


def transposed(held: Any, parameters: Mapping[str, torch.Tensor], value: Any = Fp8Format.value) -> Fp8:
    made: Fp8 = value(held, parameters)
    return replace(made, scale=made.scale.mT.reshape(made.scale.shape))


def by_value(exponents: torch.Tensor) -> torch.Tensor:
    return exponents.view(torch.uint8).float() / 127


def turned(held: Any, parameters: Mapping[str, torch.Tensor], value: Any = PartsFormat.value) -> Parts:
    return Parts(value(held, parameters).parts[::-1])


def unsigned(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return packed.packed((numbers & 15).view(torch.uint8), bits).view(torch.int32)


# The packing, what is changed, and the shape if it is not the first one.
BROKEN: dict[str, tuple[Any, ...]] = {
    "halves of a byte swapped": ("ct-int4-g32", packed, "integers", swapped),
    "an order of inputs ignored": ("gptq-v1-order", PackedFormat, "value", without_order),
    "zero points one too small": ("gptq-v1-order", gptq, "SHIFTS", {"gptq": 0}),
    "numbers of a word one after another": ("awq", repack, "AWQ_PLACES", (8, 1)),
    "scales transposed": ("fp8-blocks-f32", Fp8Format, "value", transposed, WIDE),
    "exponents by value": ("ct-mxfp8", transforms, "powers", by_value),
    "parts in another order": ("ct-parts", PartsFormat, "value", turned),
    "signs ignored": ("ct-w4a8", layouts, "_signed", unsigned),
    "scales of the group before": ("ct-int8-g128-zeros", PackedInt, "_scaled", next_scales),
}


def broken_cases() -> Iterator[object]:
    for broken, (name, target, attribute, value, *shapes) in BROKEN.items():
        packing, (shape, *_) = next(packing for packing in PACKINGS if packing.name == name), (*shapes, SHAPES[0])
        change = (target, attribute, value)
        yield pytest.param(shape, packing, change, id=broken, marks=pytest.mark.xdist_group(shape.name))


@pytest.mark.parametrize(("shape", "packing", "change"), list(broken_cases()))
def test_a_format_that_is_misread_fails(
    shape: Shape,
    packing: Packing,
    change: tuple[object, str, object],
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = truth_of(shape, packing, Path(pytestconfig.rootpath))
    monkeypatch.setattr(*change)
    assert not play(truth, shape, None).passes("float32")
