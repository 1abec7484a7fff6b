"""4-bit floats: what a config.json says of them, and which tensors of them a weight takes or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import registry
from engine.models.reader import ConfigError
from engine.quant import config
from engine.quant.scheme import Fp4Scheme, Fp8Scheme
from engine.weights.checkpoint import WeightsError
from engine.weights.rules import Rule, Stack, StackConcat
from kernels.weight import Fp4
from kernels.weight.inputs import Inputs, round_fp4
from tests.gate.fp4 import MODELOPT, fp4_config, mxfp4, nvfp4
from tests.gate.fp8 import BLOCKS
from tests.gate.integers import Pack
from tests.quant.test_integers import QKV, drawn, loaded, read, stored

CT_MX, CT_NV = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
FORMS = [
    pytest.param(fp4_config(CT_MX), mxfp4(), id="mxfp4"),
    pytest.param(fp4_config(CT_NV), nvfp4(), id="nvfp4"),
    pytest.param(MODELOPT, nvfp4(modelopt=True), id="modelopt"),
]
ROUNDING = pytest.param(fp4_config(CT_NV, inputs=True), nvfp4(inputs=True), id="nvfp4-inputs")
ONE = Rule("one", ("m.layers.0.q.weight",))


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-7) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_parts_of_a_product_keep_the_factor_of_each(tmp_path: Path, said: dict[str, Any], pack: Pack) -> None:
    tensors, numbers = stored(pack, {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": 3 * drawn(24, 96)})
    value = loaded(tmp_path, tensors, said, QKV, 64, 96).value
    assert isinstance(value, Fp4)
    close(value.dense(torch.float32), torch.cat(list(numbers.values())))


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_experts_are_the_numbers_that_they_stand_for(tmp_path: Path, said: dict[str, Any], pack: Pack) -> None:
    names = [f"m.layers.0.experts.{e}.{part}" for e in range(3) for part in ("gate", "up")]
    tensors, numbers = stored(pack, {name: (i + 1) * drawn(24, 64) for i, name in enumerate(names)})
    rule = Rule("experts", tuple(f"{name}.weight" for name in names), StackConcat())
    value = loaded(tmp_path, tensors, said, rule, 3, 48, 64).value
    wanted = torch.stack([torch.cat([numbers[names[2 * e]], numbers[names[2 * e + 1]]]) for e in range(3)])
    close(value.dense(torch.float32), wanted)
    close(value.matrix(1).rows(torch.tensor([5, 0]), torch.float32), wanted[1, [5, 0]])


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_what_is_read_dense_is_dequantized_while_it_is_loaded(tmp_path: Path, said: dict[str, Any], pack: Pack) -> None:
    tensors, numbers = stored(pack, {"m.layers.0.q": drawn(40, 96)})
    close(loaded(tmp_path, tensors, said, ONE, 40, 96, dense=True).value.dense(torch.float32), numbers["m.layers.0.q"])


def test_experts_of_deepseek_v4_are_found_by_their_own_names_beside_8_bit_floats(tmp_path: Path) -> None:
    said = {"quantization_config": BLOCKS, "expert_dtype": "fp4"}
    method = config.read(said)
    assert method is not None
    assert method.scheme("layers.3.ffn.experts.17.w1") == Fp4Scheme("scale")
    for other in ("layers.3.ffn.shared_experts.w1", "layers.3.attn.wq_a"):
        assert method.scheme(other) == Fp8Scheme("dynamic by 128", (128, 128))
    assert config.read({**said, "expert_dtype": "fp8"}) == config.read({"quantization_config": BLOCKS})
    names = [f"m.layers.0.ffn.experts.{e}.w2" for e in range(2)]
    tensors, numbers = stored(mxfp4("weight", "scale", named=True), {name: drawn(24, 64) for name in names})
    rule = Rule("down", tuple(f"{name}.weight" for name in names), Stack())
    value = loaded(tmp_path, tensors, BLOCKS, rule, 2, 24, 64, method=method).value
    assert isinstance(value, Fp4)
    close(value.dense(torch.float32), torch.stack(list(numbers.values())))


def test_inputs_of_4_bits_take_the_largest_factor_of_a_product_unless_they_are_to_stay(tmp_path: Path) -> None:
    tensors, numbers = stored(nvfp4(), {"m.layers.0.q": drawn(40, 96), "m.layers.0.k": drawn(24, 96)})
    for name, factor in (("q", 500.0), ("k", 250.0)):
        tensors[f"m.layers.0.{name}.input_global_scale"] = torch.tensor([factor])
    said = fp4_config(CT_NV, inputs=True)
    x, whole = drawn(5, 96), torch.cat(list(numbers.values()))
    value = loaded(tmp_path, tensors, said, QKV, 64, 96).value
    assert isinstance(value, Fp4)
    assert value.rounding.scale == 1 / 250
    rounded = round_fp4(x, Inputs("fp4", 16, scale=torch.tensor(1 / 250)))
    close(value.product(x), rounded @ whole.T, 1e-5)
    close(loaded(tmp_path, tensors, said, QKV, 64, 96, activations="16bit").value.product(x), x @ whole.T, 1e-5)


def test_exponents_need_no_factor_of_inputs(tmp_path: Path) -> None:
    tensors, numbers = stored(mxfp4(), {"m.layers.0.q": drawn(40, 96)})
    x = drawn(5, 96)
    value = loaded(tmp_path, tensors, fp4_config(CT_MX, inputs=True), ONE, 40, 96).value
    close(value.product(x), round_fp4(x, Inputs("fp4", 32)) @ numbers["m.layers.0.q"].T, 1e-5)


def test_inputs_round_to_numbers_of_4_bits_ties_to_an_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, 0.0, 0.1, 5.1, 9.0, -9.0])
    row = torch.cat((ties.clamp(-6, 6), torch.zeros(16)))
    want = torch.tensor([0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -4, 0, 0, 6, 6, -6.0])
    close(round_fp4(row[None], Inputs("fp4", 32))[0, :16], want)


NONE = torch.empty(0)


@pytest.mark.parametrize(
    ("form", "tensors", "sentence"),
    [
        (1, {"weight_global_scale": NONE}, r"nvfp4-pack-quantized FP4, and m\.layers\.0\.q\.weight_global_scale"),
        (1, {"weight_global_scale": torch.zeros(1)}, "zero or no finite number"),
        (
            1,
            {"weight_global_scale": torch.full((1,), torch.inf)},
            r"q\.weight_scale: the scale of the whole tensor, which",
        ),
        (2, {"weight_scale_2": torch.ones(1, dtype=torch.int32)}, r"q\.weight_scale_2 is stored as int32"),
        (3, {"input_global_scale": torch.ones(1, dtype=torch.uint8)}, r"q\.input_global_scale is stored as uint8"),
        (0, {"weight_scale": torch.ones(40, 3)}, r"q\.weight_scale is float32 \[40, 3\]"),
        (0, {"weight_scale": torch.ones(40, 2, dtype=torch.uint8)}, r"misshapen: m\.layers\.0\.q\.weight_scale"),
        (3, {"input_global_scale": NONE}, r"missing: .*q\.input_global_scale"),
        (3, {"input_global_scale": torch.zeros(1)}, "no finite number above zero"),
        (2, {"weight_scale_2": torch.ones(2)}, r"misshapen: .*weight_scale_2"),
        (2, {"k_zero": torch.ones(2)}, r"not part of this model: m\.layers\.0\.q\.k_zero"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, form: int, tensors: Any, sentence: str) -> None:
    said, pack = [*FORMS, ROUNDING][form].values
    made, _ = stored(pack, {"m.layers.0.q": drawn(40, 96)})  # type: ignore[arg-type]
    made |= {f"m.layers.0.q.{end}": tensor for end, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in made.items() if tensor.numel()}
    with pytest.raises(WeightsError, match=sentence):
        loaded(tmp_path, kept, said, ONE, 40, 96)  # type: ignore[arg-type]


def test_what_modelopt_says() -> None:
    fp8 = read({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.self_attn*"]})
    assert fp8.scheme("model.layers.0.mlp.up_proj") == Fp8Scheme("static")
    assert fp8.scheme("model.layers.0.self_attn.q_proj") is None
    fp4 = read({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]})
    assert fp4.scheme("model.layers.0.mlp.up_proj") == Fp4Scheme("modelopt", quantized_inputs=True)
    assert fp4.scheme("lm_head") is None


def test_a_file_of_modelopts_own_says_it_where_config_json_is_silent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert registry.quantization(tmp_path) is None
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    made = registry.quantization(tmp_path)
    assert made is not None
    assert made.scheme("model.layers.0.mlp.up_proj") == Fp8Scheme("static")
    assert made.scheme("lm_head") is None
    file.write_text(json.dumps({"quantization": {**own, "quant_algo": "INT4_AWQ"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization: quant_algo = 'INT4_AWQ'"):
        registry.quantization(tmp_path)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({**MODELOPT, "quant_algo": "INT4_AWQ"}, "quant_algo = 'INT4_AWQ'"),
        ({**MODELOPT, "group_size": 32}, "group_size = 32"),
        ({**MODELOPT, "rotate": True}, "rotate = True"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(said)
    assert sentence in str(refusal.value)
