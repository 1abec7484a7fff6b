"""Packed integers: what a config.json says of them, and which tensors of them a weight takes or refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.reader import ConfigError
from engine.quant import config
from engine.quant.formats import layouts
from engine.quant.method import Method
from engine.quant.plan import plan, spare_biases
from engine.quant.scheme import Fp8Scheme, Int8Scheme, PackedScheme
from engine.quant.weight import Weight
from engine.weights import loader, runs, staging
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Concat, Rule, Stack, StackConcat
from kernels.registry import Op
from kernels.repack import reference
from kernels.testing import bound
from kernels.weight import Dense, Int8, PackedInt, Parts
from kernels.weight.packed import packed
from tests.gate.fp8 import float_quantized
from tests.gate.integers import (
    KIMI_IGNORES,
    Pack,
    Tensors,
    awq,
    awq_config,
    compressed,
    gptq,
    gptq_config,
    int4_bytes,
    int8_rows,
    int8_tensor,
    int_quantized,
    pack_quantized,
    w4afp8,
    with_inputs,
)

QKV = Rule("layer", ("m.layers.0.q.weight", "m.layers.0.k.weight"), Concat((40, 24)))


def read(said: dict[str, Any]) -> Any:
    return config.read({"quantization_config": said})


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def stored(pack: Pack, matrices: dict[str, torch.Tensor]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """The tensors of modules, and the numbers that they stand for."""
    tensors: Tensors = {}
    numbers = {}
    for name, matrix in matrices.items():
        made, numbers[name] = pack(matrix)
        tensors |= {f"{name}.{end}": tensor.contiguous() for end, tensor in made.items()}
    return tensors, numbers


def loaded(
    folder: Path,
    tensors: Tensors,
    said: dict[str, Any],
    rule: Rule,
    *shape: int,
    dense: bool = False,
    method: Method | None = None,
    activations: str = "auto",
    ops: Any = None,
    device: str = "cpu",
) -> Weight:
    save_file(tensors, folder / "model.safetensors")
    weight, checkpoint = Weight(shape, torch.float32, "dense" if dense else "any"), Checkpoint.open(folder)
    rules = plan({rule.target: weight}, [rule], checkpoint, method or read(said), activations)
    rules = rules if ops is None else [one.bound(ops) for one in rules]
    weight.to_empty(device=device)
    parameters = {f"{rule.target}.{name}": p for name, p in weight.named_parameters()}
    loader.load(parameters, checkpoint, rules, zeros=spare_biases([rule], checkpoint))
    weight.check(rule.target)
    return weight


FORMS = [
    pytest.param(compressed(4, 32), pack_quantized(4, 32), id="compressed-tensors"),
    pytest.param(
        compressed(4, 32, False, "group"), pack_quantized(4, 32, zeros=True, ordered=True), id="zeros and an order"
    ),
    pytest.param(compressed(8, 0), pack_quantized(8, 0), id="int8, a scale a row"),
    pytest.param(awq_config(32), awq(32), id="awq"),
    pytest.param(gptq_config(4, 32, True), gptq(4, 32, ordered=True), id="gptq, an order"),
    pytest.param(gptq_config(8, 16, checkpoint_format="gptq_v2"), gptq(8, 16, 0), id="gptq v2, int8"),
]


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_parts_of_a_product_are_the_numbers_that_they_stand_for(tmp_path: Path, said: dict, pack: Pack) -> None:
    tensors, numbers = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    value = loaded(tmp_path, tensors, said, QKV, 64, 96).value
    assert isinstance(value, PackedInt)
    torch.testing.assert_close(value.dense(torch.float32), torch.cat(list(numbers.values())), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_experts_are_the_numbers_that_they_stand_for(tmp_path: Path, said: dict, pack: Pack) -> None:
    names = [f"m.layers.0.experts.{e}.{part}" for e in range(3) for part in ("gate", "up")]
    tensors, numbers = stored(pack, {name: drawn(24, 64) + i for i, name in enumerate(names)})
    rule = Rule("experts", tuple(f"{name}.weight" for name in names), StackConcat())
    value = loaded(tmp_path, tensors, said, rule, 3, 48, 64).value
    assert isinstance(value, PackedInt)
    wanted = torch.stack([torch.cat([numbers[names[2 * e]], numbers[names[2 * e + 1]]]) for e in range(3)])
    torch.testing.assert_close(value.dense(torch.float32), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(value.matrix(1).dense(torch.float32), wanted[1], rtol=1e-6, atol=1e-6)
    ids = torch.tensor([5, 0])
    torch.testing.assert_close(value.matrix(2).rows(ids, torch.float32), wanted[2, ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_what_is_read_dense_is_dequantized_while_it_is_loaded(tmp_path: Path, said: dict, pack: Pack) -> None:
    tensors, numbers = stored(pack, {"m.layers.0.q": drawn(40, 96)})
    weight = loaded(tmp_path, tensors, said, Rule("one", ("m.layers.0.q.weight",)), 40, 96, dense=True)
    torch.testing.assert_close(weight.value.dense(torch.float32), numbers["m.layers.0.q"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("said", "pack"), FORMS)
@pytest.mark.parametrize("packed_one", ["q", "k"])
def test_a_product_of_which_a_part_is_stored_as_it_is_has_parts(
    tmp_path: Path, said: dict, pack: Pack, packed_one: str
) -> None:
    """As AutoAWQ's DeepSeek-V3 is published: kv_a_proj_with_mqa is left out, and q_a_proj is not."""
    plain = {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)}
    name = f"m.layers.0.{packed_one}"
    tensors, numbers = stored(pack, {name: plain.pop(name)})
    tensors |= {f"{other}.weight": matrix.bfloat16() for other, matrix in plain.items()}
    numbers |= {other: matrix.bfloat16().float() for other, matrix in plain.items()}
    value = loaded(tmp_path, tensors, said, QKV, 64, 96).value
    assert isinstance(value, Parts)
    assert [type(part) for part in value.parts] == ([PackedInt, Dense] if packed_one == "q" else [Dense, PackedInt])
    wanted = torch.cat([numbers["m.layers.0.q"], numbers["m.layers.0.k"]])
    torch.testing.assert_close(value.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_a_matrix_that_is_repacked_in_parts_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict, pack: Pack
) -> None:
    tensors, _ = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    whole = loaded(tmp_path, tensors, said, QKV, 64, 96)
    monkeypatch.setattr(runs, "BUFFER_BYTES", 100)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 100)
    parts = dict(loaded(tmp_path, tensors, said, QKV, 64, 96).named_parameters())
    for name, parameter in whole.named_parameters():
        assert torch.equal(parts[name], parameter), name


@pytest.mark.parametrize("buffer_bytes", [100, runs.BUFFER_BYTES])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_kernels_repack_to_the_bits_of_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict, pack: Pack, dense: bool, buffer_bytes: int
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    launched: list[str] = []

    def repack(words: torch.Tensor, layout: str, *rest: Any) -> torch.Tensor:
        launched.append(layout)
        return bound(Op("repack"))(words, layout, *rest)

    tensors, _ = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    wanted = loaded(tmp_path, tensors, said, QKV, 64, 96, dense=dense)
    monkeypatch.setitem(staging.THREADS, "cpu", 1)  # the interpreter runs one launch at a time
    monkeypatch.setattr(runs, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(runs, "MADE_BYTES", {kind: {"rows": 100, "columns": 100} for kind in ("cpu", "cuda")})
    ops = SimpleNamespace(repack=repack)
    parts = dict(loaded(tmp_path, tensors, said, QKV, 64, 96, dense=dense, ops=ops, device=device).named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(parts[name].cpu(), parameter), name
    scheme = read(said).scheme("m.layers.0.q")
    by_kernel = scheme.layout != "pack-quantized" or (scheme.ordered and not dense)
    assert set(launched) == ({scheme.layout} if by_kernel else set())


@pytest.mark.parametrize("inputs", [96, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_numbers_turned_one_by_one(inputs: int, bits: int) -> None:
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (inputs, 5), dtype=torch.int32)
    if bits == 4:
        wanted = packed(layouts.unpacked(words, 4, awq=True)[:, :37].t().contiguous(), 4).view(torch.int32)
        assert torch.equal(layouts.Words("awq", 4, inputs)([words], (37, len(wanted[0]))), wanted)
    groups = torch.arange(inputs) // 4
    groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
    gptq = words[: -(-inputs * bits // 32)]
    numbers = layouts.unpacked(gptq.t(), bits)[:, torch.sort(groups, stable=True).indices]
    wanted = packed(numbers, bits).view(torch.int32)
    made = layouts.Words("gptq", bits, inputs, ordered=True)([gptq, groups], (5, len(wanted[0])))
    assert torch.equal(made, wanted)


def test_the_first_version_of_gptq_stores_zero_points_less_one_and_may_mean_one_more_than_fits(tmp_path: Path) -> None:
    tensors, _ = stored(gptq(4, 32), {"m.layers.0.q": drawn(40, 32)})
    tensors["m.layers.0.q.qzeros"] = torch.full_like(tensors["m.layers.0.q.qzeros"], -1)
    rule = Rule("one", ("m.layers.0.q.weight",))
    value = loaded(tmp_path, tensors, gptq_config(4, 32), rule, 40, 32).value
    assert isinstance(value, PackedInt)
    assert value.zero is not None
    assert value.zero.unique().tolist() == [16]


def test_biases_that_autogptq_wrote_are_left_out_if_they_are_zero(tmp_path: Path) -> None:
    tensors, numbers = stored(gptq(4, 32), {"m.layers.0.q": drawn(40, 32)})
    rule = Rule("one", ("m.layers.0.q.weight",))
    tensors["m.layers.0.q.bias"] = torch.zeros(40).half()
    value = loaded(tmp_path, tensors, gptq_config(4, 32), rule, 40, 32).value
    torch.testing.assert_close(value.dense(torch.float32), numbers["m.layers.0.q"], rtol=1e-6, atol=1e-7)
    tensors["m.layers.0.q.bias"][3] = 1
    with pytest.raises(WeightsError, match=r"m\.layers\.0\.q\.bias is not zero"):
        loaded(tmp_path, tensors, gptq_config(4, 32), rule, 40, 32)


def changed(form: int, **tensors: torch.Tensor) -> tuple[dict, Tensors]:
    """A form's tensors with others put in their place; those of no number are left out."""
    said, pack = FORMS[form].values
    made, _ = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})  # type: ignore[arg-type]
    made |= {f"m.layers.0.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    return said, {name: tensor for name, tensor in made.items() if tensor.numel()}  # type: ignore[return-value]


NONE = torch.empty(0)


@pytest.mark.parametrize(
    ("form", "tensors", "sentence"),
    [
        (
            0,
            {"q__weight_scale": NONE},
            r"m\.layers\.0\.q is stored as pack-quantized, and m\.layers\.0\.q\.weight_scale",
        ),
        (0, {"q__weight_packed": torch.zeros(40, 12)}, r"q\.weight_packed is float32 \[40, 12\]"),
        (0, {"q__weight_packed": torch.zeros(40, 11, dtype=torch.int32)}, r"misshapen: m\.layers\.0\.q\.weight_packed"),
        (0, {"q__weight_shape": torch.tensor([40, 95])}, r"layer: it says that it has the shape \[40, 95\]"),
        (0, {"q__weight_zero_point": torch.zeros(5, 3, dtype=torch.int32)}, r"not part of this model: .*zero_point"),
        (1, {"q__weight_g_idx": torch.zeros(96, dtype=torch.int32)}, "inputs are not in groups of 32"),
        (1, {"q__weight_g_idx": torch.arange(96).int() // 32}, "parts form one product .* different orders"),
        (1, {"q__weight_g_idx": NONE}, r"missing: m\.layers\.0\.q\.weight_g_idx$"),
        (3, {"q__qzeros": NONE}, r"stored as awq, and m\.layers\.0\.q\.qzeros is missing"),
        (
            3,
            {"q__qzeros": torch.zeros(3, 5, dtype=torch.int64)},
            r"q\.qzeros is int64 \[3, 5\], which awq",
        ),
        (1, {"q__weight_zero_point": torch.zeros(5, 3)}, r"q\.weight_zero_point is float32 \[5, 3\]"),
        (3, {"q__scales": torch.zeros(3, 39).half()}, r"misshapen: m\.layers\.0\.q\.scales"),
        (5, {"q__g_idx": 5 - torch.arange(96).int() // 16}, r"layer: it gives its inputs an order"),
        (5, {"q__qweight": NONE, "q__weight": torch.ones(40, 96)}, r"not part of this model: m\.layers\.0\.q\.g_idx"),
    ],
)
def test_tensors_that_make_no_sense(tmp_path: Path, form: int, tensors: Tensors, sentence: str) -> None:
    said, made = changed(form, **tensors)
    with pytest.raises(WeightsError, match=sentence):
        loaded(tmp_path, made, said, QKV, 64, 96)


def test_a_packed_module_that_the_config_leaves_out_is_refused_by_name(tmp_path: Path) -> None:
    said, made = changed(0)
    with pytest.raises(WeightsError, match=r"q\.weight_packed is stored as int32, and config\.json does not say"):
        loaded(tmp_path, made, {**said, "ignore": [r"re:.*\.q$"]}, QKV, 64, 96)


W8A8, STATIC = (
    int_quantized("channel", strategy="token", dynamic=True),
    int_quantized("tensor", strategy="tensor", dynamic=False),
)


@pytest.mark.parametrize(("said", "pack"), [(W8A8, int8_rows), (STATIC, int8_tensor)])
def test_integers_of_a_byte_and_how_their_inputs_are_rounded(tmp_path: Path, said: dict, pack: Pack) -> None:
    tensors, numbers = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    value = loaded(tmp_path, tensors, said, QKV, 64, 96).value
    assert isinstance(value, Int8)
    torch.testing.assert_close(value.dense(torch.float32), torch.cat(list(numbers.values())), rtol=1e-6, atol=1e-7)
    assert value.inputs.number == "int8"
    x = drawn(2, 96)
    scale = torch.tensor(8 / 127.5) if said is STATIC else x.abs().amax(dim=1, keepdim=True) / 127.5
    rounded = (x / scale).round().clamp(-128, 127) * scale
    torch.testing.assert_close(value.product(x), rounded @ torch.cat(list(numbers.values())).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"q__weight_scale": NONE}, r"q\.weight is stored as int8 with no weight_scale"),
        ({"q__weight_scale": torch.ones(40, 3)}, r"q\.weight_scale has the shape \[40, 3\]"),
        ({"q__weight": torch.zeros(40, 96, dtype=torch.uint8)}, r"q\.weight is stored as uint8 with a weight_scale"),
        (
            {"q__weight": torch.zeros(40 * 96, dtype=torch.int8)},
            r"q\.weight has the shape \[3840\], which is",
        ),
        ({"q__weight_scale": torch.ones(40, dtype=torch.int32)}, r"q\.weight_scale is stored as int32"),
        ({"q__weight_scale": torch.full((40, 1), torch.inf)}, "layer: a scale of them is no finite number"),
    ],
)
def test_integers_of_a_byte_that_make_no_sense(tmp_path: Path, tensors: Tensors, sentence: str) -> None:
    made, _ = stored(int8_rows, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    made |= {f"m.layers.0.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    with pytest.raises(WeightsError, match=sentence):
        loaded(tmp_path, {name: tensor for name, tensor in made.items() if tensor.numel()}, W8A8, QKV, 64, 96)


INT4 = PackedScheme("pack-quantized", 4, 32)


def test_kimi_quantizes_its_routed_experts_alone() -> None:
    made = read(compressed(4, 32, ignore=KIMI_IGNORES))
    assert made.scheme("model.layers.1.mlp.experts.3.up_proj") == INT4
    for other in ("mlp.shared_experts.up_proj", "mlp.gate_proj", "self_attn.kv_b_proj"):
        assert made.scheme(f"model.layers.1.{other}") is None
    assert made.scheme("lm_head") is None
    assert made.scheme("model.embed_tokens") is None


def test_groups_of_a_mixed_checkpoint_have_formats_of_their_own() -> None:
    first = {**compressed(4, 32)["config_groups"]["group_0"], "format": "pack-quantized"}
    second = float_quantized("channel", strategy="token", dynamic=True)["config_groups"]["group_0"]
    groups = {"a": first, "b": {**second, "format": "float-quantized", "targets": ["re:.*down_proj"]}}
    made = read(compressed(4, 32, format="mixed-precision", config_groups=groups))
    assert made.scheme("model.layers.0.mlp.up_proj") == INT4
    assert made.scheme("model.layers.0.mlp.down_proj") == Fp8Scheme("dynamic by token")


def test_integers_of_a_byte_may_have_inputs_as_they_are() -> None:
    assert read(int_quantized("channel")).scheme("model.layers.0.mlp.up_proj") == Int8Scheme("as they are")
    assert read(W8A8).scheme("model.layers.0.mlp.up_proj") == Int8Scheme("dynamic by token")
    assert read(STATIC).scheme("model.layers.0.mlp.up_proj") == Int8Scheme("static")


def test_awq_leaves_out_every_module_whose_name_holds_a_word() -> None:
    made = read(awq_config(64, modules_to_not_convert=["gate", "layers.0."]))
    assert made.scheme("model.layers.1.mlp.up_proj") == PackedScheme("awq", 4, 64, True)
    assert made.scheme("model.layers.1.mlp.gate_proj") is None
    assert made.scheme("model.layers.0.mlp.up_proj") is None
    assert made.scheme("lm_head") is None


def test_the_first_of_gptqs_rules_that_fits_holds() -> None:
    dynamic = {
        r"-:model\.layers\.0\.": {},
        r"+:.*down_proj": {"bits": 8, "group_size": -1, "desc_act": True},
        r".*\.1\..*": {"sym": False},
    }
    made = read(gptq_config(4, 128, True, dynamic=dynamic, lm_head=True))
    assert made.scheme("model.layers.0.mlp.down_proj") is None
    assert made.scheme("model.layers.1.mlp.down_proj") == PackedScheme("gptq", 8, 0, True, False, 1)
    assert made.scheme("model.layers.1.mlp.up_proj") == PackedScheme("gptq", 4, 128, True, True, 1)
    assert made.scheme("lm_head") == PackedScheme("gptq", 4, 128, True, True, 1)
    assert read(gptq_config(4, 128)).scheme("lm_head") is None


def weights(**changes: Any) -> dict[str, Any]:
    group = compressed(4, 32)["config_groups"]["group_0"]
    return compressed(4, 32, config_groups={"group_0": {**group, "weights": {**group["weights"], **changes}}})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (weights(num_bits=3), "group_0: weights: num_bits = 3"),
        (weights(group_size=48), "group_size = 48 is not implemented"),
        (weights(strategy="tensor_group"), "strategy = 'tensor_group'"),
        (weights(actorder="sideways"), "actorder = 'sideways'"),
        (weights(type="float"), "type = 'float'"),
        (weights(surprise=1), "surprise = 1"),
        (int_quantized("group", strategy="token", dynamic=True), "strategy = 'group'"),
        (int_quantized("channel", strategy="token", dynamic=True, symmetric=False), "symmetric = False"),
        (int_quantized("channel", strategy="channel", dynamic=True), "strategy = 'channel'"),
        (awq_config(128, version="gemv"), "version = 'gemv'"),
        (awq_config(128, zero_point=False), "zero_point = False"),
        ({**awq_config(128), "bits": 8}, "bits = 8"),
        (gptq_config(3, 128), "bits = 3"),
        (gptq_config(4, 100), "group_size = 100"),
        (gptq_config(4, 128, checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
        (gptq_config(4, 128, dynamic={"+:(": {}}), "no regular expression"),
        (gptq_config(4, 128, dynamic={"+:x": {"bits": 2}}), r"dynamic: \+:x: bits = 2"),
        (gptq_config(4, 128, dynamic={"+:x": {"adapter": 2}}), "adapter = 2"),
        (gptq_config(4, 128, surprise=1), "surprise = 1"),
    ],
)
def test_what_is_not_implemented_is_named(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(said)


ROUNDED_INPUTS = [
    pytest.param(with_inputs(compressed(4, 32), "int"), pack_quantized(4, 32), "int8", id="packed, int8"),
    pytest.param(with_inputs(compressed(4, 32), "float"), pack_quantized(4, 32), "fp8", id="packed, fp8"),
    pytest.param(
        with_inputs(compressed(4, 32, format="int-quantized"), "int"), int4_bytes(32), "int8", id="bytes, int8"
    ),
    pytest.param(
        with_inputs(compressed(4, 0, format="int-quantized"), "float"), int4_bytes(0), "fp8", id="bytes, fp8, a row"
    ),
]


@pytest.mark.parametrize(("said", "pack", "number"), ROUNDED_INPUTS)
def test_integers_whose_inputs_are_rounded(tmp_path: Path, said: dict, pack: Pack, number: str) -> None:
    tensors, numbers = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    value = loaded(tmp_path, tensors, said, QKV, 64, 96).value
    assert isinstance(value, PackedInt)
    assert value.rounding.number == number
    wanted = torch.cat(list(numbers.values()))
    torch.testing.assert_close(value.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)
    assert not loaded(tmp_path, tensors, said, QKV, 64, 96, activations="16bit").value.rounds_inputs
    dense = loaded(tmp_path, tensors, said, QKV, 64, 96, dense=True).value
    torch.testing.assert_close(dense.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)


def test_w4afp8_has_integers_for_experts_and_floats_for_the_rest(tmp_path: Path) -> None:
    said = {"quant_method": "w4afp8", "modules_to_not_convert": ["lm_head", "m.layers.0.self_attn"]}
    made = read(said)
    assert isinstance(made.scheme("m.layers.0.mlp.experts.3.up_proj"), PackedScheme)
    assert made.scheme("m.layers.0.mlp.shared_experts.up_proj") == Fp8Scheme("dynamic by 128", (128, 128))
    assert made.scheme("m.layers.0.self_attn.q_proj") is None
    names = [f"m.layers.0.experts.{e}.down" for e in range(2)]
    tensors, numbers = stored(w4afp8, {name: drawn(24, 256) for name in names})
    tensors[f"{names[1]}.input_scale"] = torch.tensor(0.5)
    rule = Rule("experts", tuple(f"{name}.weight" for name in names), Stack())
    value = loaded(tmp_path, tensors, said, rule, 2, 24, 256).value
    assert isinstance(value, PackedInt)
    assert value.rounding.number == "fp8"
    assert value.rounding.scale == 0.5, "the largest of all experts holds"
    torch.testing.assert_close(value.matrix(1).dense(torch.float32), numbers[names[1]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("said", "tensors", "sentence"),
    [
        (ROUNDED_INPUTS[2], {"weight": torch.full((40, 96), 8, dtype=torch.int8)}, "numbers that are not of 4 bits"),
        (ROUNDED_INPUTS[2], {"weight": torch.zeros(40, 96, dtype=torch.uint8)}, r"q\.weight is uint8 \[40, 96\]"),
        (ROUNDED_INPUTS[2], {"weight_zero_point": torch.zeros(40, 3)}, r"not part of this model: .*weight_zero_point"),
        (ROUNDED_INPUTS[0], {"input_scale": torch.ones(1)}, r"not part of this model: .*q\.input_scale"),
    ],
)
def test_tensors_beside_rounded_inputs_that_do_not_fit(
    tmp_path: Path, said: Any, tensors: Tensors, sentence: str
) -> None:
    config_of, pack, _ = said.values
    made, _ = stored(pack, {"m.layers.0.q": drawn(40, 96)})
    made |= {f"m.layers.0.q.{end}": tensor for end, tensor in tensors.items()}
    with pytest.raises(WeightsError, match=sentence):
        loaded(tmp_path, made, config_of, Rule("one", ("m.layers.0.q.weight",)), 40, 96)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"num_bits": 8, "type": "int"}, "input_activations lacks strategy"),
        ({"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}, "num_bits = 4"),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}, "symmetric = False"),
    ],
)
def test_inputs_of_other_kinds_are_refused_beside_packed_weights(inputs: dict[str, Any], sentence: str) -> None:
    group = {**compressed(4, 32)["config_groups"]["group_0"], "input_activations": inputs}
    with pytest.raises(ConfigError, match=sentence):
        read(compressed(4, 32, config_groups={"group_0": group}))


def test_random_weights_have_the_size_that_is_asked_for() -> None:
    rule = Rule("experts", tuple(f"m.layers.0.experts.{e}.down.weight" for e in range(2)), Stack())
    weight = Weight((2, 64, 96), torch.bfloat16)
    plan({"experts": weight}, [rule], None, read(gptq_config(4, 32, True)))
    weight.to_empty(device="cpu")
    weight.draw(0.1, torch.Generator().manual_seed(1))
    assert weight.value.dense(torch.float32).std().item() == pytest.approx(0.1, rel=0.1)
