"""Which format a weight takes: by the tensors that are there, and a sentence where they do not make sense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.quant import config
from engine.quant.plan import plan, shard_alignment, shared_apart
from engine.quant.weight import Kinds, Weight
from engine.weights import loader
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Flat, Rule, Split, StackConcat, concat
from kernels.weight import Dense, Fp8, PackedInt, Parts
from tests.gate.integers import gptq_config

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


def grouped(
    folder: Path, rows: int, kinds: Kinds, said: dict = BLOCKS, e8m0: bool = False
) -> tuple[Weight, torch.Tensor]:
    """Two groups of `rows` outputs of 160 inputs that stand in one matrix, and their numbers."""
    data, scale = fp8(2 * rows, 160), torch.rand(-(-2 * rows // 128), 2)
    if e8m0:
        scale = scale.log2().ceil().exp2()
    wide = scale.repeat_interleave(128, dim=0)[: 2 * rows].repeat_interleave(128, dim=1)[:, :160]
    stored = scale.to(torch.float8_e8m0fnu) if e8m0 else scale
    save_file({"o.weight": data, "o.weight_scale_inv": stored}, folder / "model.safetensors")
    weight, checkpoint = Weight((2, rows, 160), torch.bfloat16, kinds), Checkpoint.open(folder)
    rules = plan({"o": weight}, [Rule("o", ("o.weight",), Flat())], checkpoint, config.read(said))
    weight.to_empty(device="cpu")
    loader.load({f"o.{name}": p for name, p in weight.named_parameters()}, checkpoint, rules)
    weight.check("o")
    return weight, (data.float() * wide).bfloat16().view(2, rows, 160)


@pytest.mark.parametrize("e8m0", [False, True])
def test_a_reader_of_dense_and_fp8_gets_whole_blocks_as_they_are_stored(tmp_path: Path, e8m0: bool) -> None:
    weight, numbers = grouped(tmp_path, 256, "dense or fp8", e8m0=e8m0)
    assert isinstance(weight.value, Fp8)
    assert (weight.value.block, weight.value.rounds_inputs) == ((128, 128), False)
    assert weight.value.scale.shape == (2, 2, 2)
    assert torch.equal(weight.value.dense(torch.bfloat16), numbers)


@pytest.mark.parametrize(("rows", "kinds"), [(256, "dense"), (64, "dense or fp8")])
def test_other_readers_and_blocks_that_groups_share_get_dense_numbers(tmp_path: Path, rows: int, kinds: Kinds) -> None:
    weight, numbers = grouped(tmp_path, rows, kinds)
    assert isinstance(weight.value, Dense)
    assert torch.equal(weight.value.data, numbers)


def test_a_reader_of_dense_and_fp8_has_blocks_without_a_checkpoint_too() -> None:
    for said, kinds, kind in ((BLOCKS, "dense or fp8", Fp8), (BLOCKS, "dense", Dense), (ROWS, "dense or fp8", Dense)):
        weight = Weight((2, 256, 160), torch.bfloat16, kinds)  # type: ignore[arg-type]
        plan({"o": weight}, [Rule("o", ("o.weight",), Flat())], None, config.read(said))
        weight.to_empty(device="cpu")
        weight.draw(0.1, torch.Generator().manual_seed(0))
        assert isinstance(weight.value, kind)


HALF = {"q.weight": fp8(256, 160), "q.weight_scale": torch.ones(1), "k.weight": torch.ones(64, 160)}
BOTH = {"q.weight": fp8(256, 160), "k.weight": fp8(64, 160)}


def test_parts_of_a_product_are_held_as_each_is_stored(tmp_path: Path) -> None:
    value = loaded(tmp_path, {**HALF, "q.weight_scale": torch.tensor([0.5])}, ROWS).value
    assert isinstance(value, Parts)
    quantized, plain = value.parts
    assert isinstance(quantized, Fp8)
    assert isinstance(plain, Dense)
    assert (quantized.rounds_inputs, plain.rounds_inputs, value.rounds_inputs) == (True, False, True)
    wanted = torch.cat([HALF["q.weight"].float() * 0.5, HALF["k.weight"]])
    assert torch.equal(value.dense(torch.float32), wanted)
    ids = torch.tensor([255, 256, 0, 319])
    assert torch.equal(value.rows(ids, torch.float32), wanted[ids])
    x, bias = torch.randn(3, 160), torch.randn(320)
    each = [quantized.product(x, bias[:256]), plain.product(x.bfloat16(), bias[256:].bfloat16()).float()]
    both = Parts((quantized, Dense(plain.data.float())))
    assert torch.equal(both.product(x, bias)[:, :256], each[0])
    torch.testing.assert_close(both.product(x, bias)[:, 256:], each[1], rtol=0.02, atol=0.1)


def test_scales_of_different_kinds_are_parts_too(tmp_path: Path) -> None:
    scales = {"q.weight_scale_inv": torch.rand(2, 2), "k.weight_scale": torch.tensor(0.5)}
    value = loaded(tmp_path, {**BOTH, **scales}, BLOCKS).value
    assert isinstance(value, Parts)
    assert [part.block for part in value.parts if isinstance(part, Fp8)] == [(128, 128), (1, 160)]
    dense = value.dense(torch.float32)
    assert torch.equal(dense[256:], BOTH["k.weight"].float() * 0.5)
    assert torch.equal(dense[130:256, 128:], BOTH["q.weight"][130:, 128:].float() * scales["q.weight_scale_inv"][1, 1])


def test_a_tensor_of_one_part_that_is_not_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"not part of this model: k\.input_scale"):
        loaded(tmp_path, {**HALF, "k.input_scale": torch.ones(1)}, ROWS)


def experts(plain: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """FP8 matrices of two experts' gates and ups, of which some are as they are."""
    names = [f"experts.{e}.{part}" for e in range(2) for part in ("gate", "up")]
    tensors = {}
    for i, name in enumerate(names):
        if name.endswith(plain):
            tensors[f"{name}.weight"] = torch.full((32, 64), float(i))
        else:
            tensors |= {f"{name}.weight": fp8(32, 64), f"{name}.weight_scale": torch.tensor(i + 1.0)}
    return tensors, names


def test_gates_and_ups_of_a_table_may_be_stored_in_different_ways(tmp_path: Path) -> None:
    tensors, names = experts(("up",))
    save_file(tensors, tmp_path / "model.safetensors")
    rule = Rule("table", tuple(f"{name}.weight" for name in names), StackConcat())
    weight, checkpoint = Weight((2, 64, 64), torch.float32), Checkpoint.open(tmp_path)
    rules = plan({"table": weight}, [rule], checkpoint, config.read(ROWS))
    weight.to_empty(device="cpu")
    loader.load({f"table.{name}": p for name, p in weight.named_parameters()}, checkpoint, rules)
    value = weight.value
    assert isinstance(value, Parts)
    assert [type(part) for part in value.parts] == [Fp8, Dense]
    assert value.shape == (2, 64, 64)
    for e in range(2):
        dense = value.matrix(e).dense(torch.float32)
        assert torch.equal(dense[:32], fp8(32, 64).float() * (2 * e + 1))
        assert bool((dense[32:] == 2 * e + 1).all())
    assert torch.equal(value.dense(torch.float32)[1], value.matrix(1).dense(torch.float32))


def test_experts_of_one_table_must_be_stored_alike(tmp_path: Path) -> None:
    tensors, names = experts(("1.up",))
    save_file(tensors, tmp_path / "model.safetensors")
    rule = Rule("table", tuple(f"{name}.weight" for name in names), StackConcat())
    weight = Weight((2, 64, 64), torch.bfloat16)
    with pytest.raises(WeightsError, match=r"experts\.1\.up and experts\.0\.gate are stored in different ways"):
        plan({"table": weight}, [rule], Checkpoint.open(tmp_path), config.read(ROWS))


def test_a_config_that_leaves_out_a_part_of_a_product_makes_parts_without_a_checkpoint() -> None:
    weight = Weight((320, 160), torch.bfloat16)
    rules = [Rule("qk", ("m.layers.0.q.weight", "m.layers.0.k.weight"), concat(256, 64))]
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["k"]}
    plan({"qk": weight}, rules, None, config.read({"quantization_config": said}))
    value = weight.to_empty(device="cpu").value
    assert isinstance(value, Parts)
    assert [type(part) for part in value.parts] == [PackedInt, Dense]
    weight.draw(0.5, torch.Generator().manual_seed(0))
    assert 0.4 < float(value.dense(torch.float32).std()) < 0.6


ONES = {**BOTH, "q.weight_scale": torch.ones(1), "k.weight_scale": torch.ones(1)}
STATIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}


@pytest.mark.parametrize("activations", ["auto", "16bit"])
def test_scales_of_inputs_are_read_as_transformers_names_them(tmp_path: Path, activations: str) -> None:
    scales = {"q.weight_scale_inv": torch.tensor(0.5), "k.weight_scale_inv": torch.tensor(0.25)}
    scales |= {"q.activation_scale": torch.tensor(0.125), "k.activation_scale": torch.tensor(0.75)}
    value = loaded(tmp_path, {**BOTH, **scales}, STATIC, activations=activations).value
    assert isinstance(value, Fp8)
    assert value.scale[:, 0].tolist() == [0.5] * 256 + [0.25] * 64
    if activations == "auto":
        assert value.inputs.scale is not None
        assert float(value.inputs.scale) == 0.75, "one product takes the largest"
    else:
        assert not value.rounds_inputs


# The border between q and k is within a block.
INSIDE = {"q.weight": fp8(200, 160), "k.weight": fp8(120, 160), "k.weight_scale_inv": torch.ones(1, 2)}
EXPONENTS = torch.full((2, 2), 127, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "said", "sentence"),
    [
        (BOTH, ROWS, r"q\.weight is stored as float8_e4m3fn, and no scales of 8-bit floats stand beside it"),
        (BOTH, {}, "does not say that it is quantized"),
        ({**BOTH, "q.scale": torch.ones(3, 3), "k.scale": torch.ones(1)}, BLOCKS, r"q\.scale has the shape \[3, 3\]"),
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


def test_ranks_respect_the_groups_of_every_part() -> None:
    algorithms = {"m.q": "FP8", "m.k": "NVFP4", "m.v": "FP8_PB_WO"}
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    method, split = config.read({"quantization_config": said}), Split("inputs", "inner")
    for parts, alignment in (("q", 1), ("qk", 16), ("qkv", 128)):
        names = tuple(f"m.{part}.weight" for part in parts)
        rule = Rule("one", names, concat(*(8 for _ in parts)), splits=(split,))
        assert shard_alignment([rule], method) == alignment


@pytest.mark.parametrize(("group", "ordered", "alignment"), [(128, False, 128), (128, True, 32), (16, True, 16)])
def test_ranks_may_take_some_inputs_of_a_group_in_an_order(group: int, ordered: bool, alignment: int) -> None:
    method = config.read({"quantization_config": gptq_config(4, group, ordered)})
    rule = Rule("one", ("m.layers.0.down.weight",), splits=(Split("inputs", "inner"),))
    assert shard_alignment([rule], method) == alignment


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
