"""Which format a weight takes: by the tensors that are there, and a sentence where they do not make sense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.quant import config
from engine.quant.plan import plan, shard_alignment, shared_apart
from engine.quant.weight import Weight
from engine.weights import loader
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Rule, concat
from kernels.weight import Dense, Fp8

BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
ROWS = {"quantization_config": {"quant_method": "fp8"}}
RULES = [Rule("qk", ("q.weight", "k.weight"), concat(256, 64))]


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.float8_e4m3fn)


def loaded(
    folder: Path, tensors: dict[str, torch.Tensor], said: dict, k: int = 160, activations: str = "auto"
) -> Weight:
    save_file(tensors, folder / "model.safetensors")
    weight, checkpoint = Weight((320, k), torch.bfloat16), Checkpoint.open(folder)
    rules = plan({"qk": weight}, RULES, checkpoint, config.read(said), activations)
    weight.to_empty(device="cpu")
    loader.load({f"qk.{name}": p for name, p in weight.named_parameters()}, checkpoint, rules)
    weight.check("qk")
    return weight


def test_blocks_are_held_by_blocks_and_multiply(tmp_path: Path) -> None:
    scales = {"q.weight_scale_inv": torch.rand(2, 2), "k.weight_scale_inv": torch.rand(1, 2).bfloat16()}
    data = {"q.weight": fp8(256, 160), "k.weight": fp8(64, 160)}
    value = loaded(tmp_path, {**data, **scales}, BLOCKS).value
    assert isinstance(value, Fp8)
    assert value.scale.shape == (3, 2)
    dense = value.dense(torch.float32)
    assert torch.equal(dense[130:256, 128:], data["q.weight"][130:, 128:].float() * scales["q.weight_scale_inv"][1, 1])
    wanted = data["k.weight"][:, :128].float() * scales["k.weight_scale_inv"][0, 0].float()
    assert torch.equal(dense[256:, :128], wanted)


def test_scales_that_are_powers_of_two_may_be_stored_as_such(tmp_path: Path) -> None:
    exponents = torch.tensor([[0, 127], [130, 120]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {"q.weight": fp8(256, 160), "k.weight": fp8(64, 160)}
    tensors |= {"q.weight_scale_inv": exponents, "k.weight_scale_inv": exponents[:1].clone()}
    value = loaded(tmp_path, tensors, BLOCKS).value
    assert isinstance(value, Fp8)
    assert value.scale.tolist() == [[2.0**-127, 1.0], [8.0, 2.0**-7], [2.0**-127, 1.0]]


@pytest.mark.parametrize("scale", [[0.25], [[0.25]]], ids=["a vector", "a matrix"])
def test_one_scale_a_source_becomes_one_a_row(tmp_path: Path, scale: list) -> None:
    tensors = {"q.weight": fp8(256, 160), "k.weight": fp8(64, 160)}
    tensors |= {"q.weight_scale": torch.tensor(0.5), "k.weight_scale": torch.tensor(scale)}
    value = loaded(tmp_path, tensors, ROWS).value
    assert isinstance(value, Fp8)
    assert value.scale[:, 0].tolist() == [0.5] * 256 + [0.25] * 64


def test_what_is_stored_as_it_is_stays_so_though_the_config_does_not_say_that_it_was_left_out(tmp_path: Path) -> None:
    tensors = {"q.weight": torch.ones(256, 160).bfloat16(), "k.weight": torch.ones(64, 160).bfloat16()}
    assert isinstance(loaded(tmp_path, tensors, BLOCKS).value, Dense)


HALF = {"q.weight": fp8(256, 160), "q.weight_scale": torch.ones(1), "k.weight": torch.ones(64, 160)}
BOTH = {"q.weight": fp8(256, 160), "k.weight": fp8(64, 160)}


def test_a_product_of_which_a_part_is_quantized_is_dense_where_its_inputs_stay_as_they_are(tmp_path: Path) -> None:
    value = loaded(tmp_path, {**HALF, "q.weight_scale": torch.tensor([0.5])}, ROWS, activations="16bit").value
    assert isinstance(value, Dense)
    wanted = torch.cat([HALF["q.weight"].float() * 0.5, HALF["k.weight"]])
    assert torch.equal(value.dense(torch.float32), wanted.bfloat16().float())


def test_a_config_that_leaves_out_a_part_of_a_product_makes_it_dense_without_a_checkpoint() -> None:
    weight = Weight((320, 160), torch.bfloat16)
    rules = [Rule("qk", ("m.layers.0.q.weight", "m.layers.0.k.weight"), concat(256, 64))]
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["k"]}
    plan({"qk": weight}, rules, None, config.read({"quantization_config": said}))
    assert isinstance(weight.to_empty(device="cpu").value, Dense)


ONES = {**BOTH, "q.weight_scale": torch.ones(1), "k.weight_scale": torch.ones(1)}
STATIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
# The border between q and k is within a block.
INSIDE = {"q.weight": fp8(200, 160), "k.weight": fp8(120, 160), "k.weight_scale_inv": torch.ones(1, 2)}
EXPONENTS = torch.full((2, 2), 127, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "said", "sentence"),
    [
        (HALF, ROWS, "stored in different ways"),
        (BOTH, ROWS, r"q\.weight is stored as float8_e4m3fn, and no scales of 8-bit floats stand beside it"),
        (BOTH, {}, "does not say that it is quantized"),
        ({**BOTH, "q.scale": torch.ones(3, 3), "k.scale": torch.ones(1)}, BLOCKS, r"q\.scale has the shape \[3, 3\]"),
        ({**BOTH, "q.scale": torch.ones(2, 2), "k.scale": torch.ones(1)}, BLOCKS, "of different kinds"),
        ({**ONES, "k.weight": fp8(64 * 160)}, ROWS, r"k\.weight has the shape \[10240\], which is no matrix"),
        (
            {**INSIDE, "q.weight_scale_inv": EXPONENTS},
            BLOCKS,
            r"q\.weight_scale_inv is stored as uint8, and scales",
        ),
        ({**ONES, "k.weight_scale": torch.ones(1).int()}, ROWS, r"k\.weight_scale is stored as int32"),
        ({**ONES, "k.weight_scale": torch.tensor(float("nan"))}, ROWS, "qk: a scale of them is no finite number"),
        (
            {**ONES, "q.input_scale": torch.zeros(1), "k.input_scale": torch.zeros(1)},
            STATIC,
            "qk: the scale of their inputs is no finite number above zero",
        ),
    ],
)
def test_tensors_that_make_no_sense(
    tmp_path: Path, tensors: dict[str, torch.Tensor], said: dict, sentence: str
) -> None:
    with pytest.raises(WeightsError, match=sentence):
        loaded(tmp_path, tensors, said)


def test_patterns_and_modules_are_counted_together() -> None:
    """Each name takes as many steps as are allowed for one; what adds up is the names."""
    dynamic = {rf"-:.*\.layers\.{layer}\.": {} for layer in range(2000)}
    method = config.read(
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}}
    )
    assert method is not None
    few = [Rule(f"{layer}", (f"{layer}.weight",)) for layer in range(100)]
    plan({}, few, None, method)
    for ask in (lambda rules: plan({}, rules, None, method), lambda rules: shared_apart(rules, None, method)):
        with pytest.raises(WeightsError, match=r"\d+ steps for each of 5000 modules, and at most 50000000"):
            ask(few * 50)
    with pytest.raises(WeightsError, match="write fewer patterns"):
        shard_alignment(few * 50, method)
