"""8-bit floats with an exponent for 32 inputs, and scales of blocks that stand in four dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.quant import config
from engine.quant.plan import plan
from engine.quant.weight import Weight
from engine.weights import loader
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Rule, concat
from kernels.weight import Fp8
from kernels.weight.inputs import Inputs
from tests.gate.fp8 import fp8_blocks, modelopt, mxfp8, mxfp8_config

QK = Rule("one", ("m.q.weight", "m.k.weight"), concat(40, 24))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def stored() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made, numbers = {}, []
    for name, rows in (("m.q", 40), ("m.k", 24)):
        tensors, meant = mxfp8(drawn(rows, 80))
        made |= {f"{name}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        numbers.append(meant)
    return made, torch.cat(numbers)


def loaded(
    folder: Path, tensors: dict[str, torch.Tensor], said: dict[str, Any], rule: Rule = QK, dense: bool = False
) -> Weight:
    save_file(tensors, folder / "model.safetensors")
    checkpoint, weight = (
        Checkpoint.open(folder).flattened(),
        Weight((64, 80), torch.float32, "dense" if dense else "any"),
    )
    rules = plan({"one": weight}, [rule], checkpoint, config.read({"quantization_config": said}))
    weight.to_empty(device="cpu")
    loader.load({f"one.{name}": p for name, p in weight.named_parameters()}, checkpoint, rules)
    weight.check("one")
    return weight


@pytest.mark.parametrize("named", [False, True], ids=["bytes", "under their own dtype"])
@pytest.mark.parametrize("said", [mxfp8_config(inputs=True), modelopt("MXFP8")], ids=["compressed-tensors", "modelopt"])
def test_exponents_are_those_of_two(tmp_path: Path, said: dict[str, Any], named: bool) -> None:
    tensors, numbers = stored()
    if named:
        tensors = {
            name: tensor.view(torch.float8_e8m0fnu) if tensor.dtype == torch.uint8 else tensor
            for name, tensor in tensors.items()
        }
    value = loaded(tmp_path, tensors, said).value
    assert isinstance(value, Fp8)
    assert (value.block, value.inputs) == ((1, 32), Inputs("fp8", 32, power_of_two=True))
    assert torch.equal(value.dense(torch.float32), numbers)
    ids = torch.tensor([63, 0, 40])
    assert torch.equal(value.rows(ids, torch.float32), numbers[ids])


def test_weights_alone_leave_inputs_as_they_are(tmp_path: Path) -> None:
    value = loaded(tmp_path, stored()[0], mxfp8_config()).value
    assert not value.rounds_inputs


def test_what_is_read_dense_is_dequantized_while_it_is_loaded(tmp_path: Path) -> None:
    tensors, numbers = stored()
    assert torch.equal(loaded(tmp_path, tensors, mxfp8_config(), dense=True).value.dense(torch.float32), numbers)


def test_the_least_exponent_is_a_number_too(tmp_path: Path) -> None:
    tensors, _ = stored()
    tensors["m.q.weight_scale"][0] = torch.tensor([0, 1, 254], dtype=torch.uint8)
    value = loaded(tmp_path, tensors, mxfp8_config()).value
    assert isinstance(value, Fp8)
    assert value.scale[0].tolist() == [2.0**-127, 2.0**-126, 2.0**127]


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("m.q.weight_scale", torch.ones(40, 3), r"m\.q\.weight_scale is stored as float32"),
        ("m.k.weight_scale", torch.full((24, 3), 255, dtype=torch.uint8), "a scale of them is no finite number"),
        ("m.k.weight_scale", torch.ones(24, 1, dtype=torch.uint8), r"m\.k\.weight_scale has the shape \[24, 1\]"),
        ("m.k.weight_scale_2", torch.ones(1), r"not part of this model: m\.k\.weight_scale_2"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, tensor: torch.Tensor, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence):
        loaded(tmp_path, {**stored()[0], name: tensor}, mxfp8_config())


def test_scales_of_blocks_may_stand_in_four_dimensions(tmp_path: Path) -> None:
    tensors, numbers = fp8_blocks(torch.float32, "weight_scale", apart=True)(drawn(64, 80))
    assert tensors["weight_scale"].shape == (1, 1, 1, 1)
    made = {f"m.q.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    value = loaded(tmp_path, made, modelopt("FP8_PB_WO"), Rule("one", ("m.q.weight",))).value
    assert isinstance(value, Fp8)
    assert not value.rounds_inputs
    assert torch.equal(value.dense(torch.float32), numbers)
