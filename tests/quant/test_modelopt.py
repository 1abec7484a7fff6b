"""What modelopt says of a checkpoint, for all of its layers or for each by its name; and fbgemm's FP8."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.reader import ConfigError
from engine.quant import config
from engine.quant.scheme import Fp4Scheme, Fp8Scheme

BLOCKS, MXFP8 = Fp8Scheme("as they are", (128, 128)), Fp8Scheme("dynamic by 32", (1, 32), power_of_two=True)

# In the form of modelopt's mixed exports, one name of each kind; whole published files were not read.
MIXED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["mtp*", "mtp.layers.0*"],
    "quantized_layers": {
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.0.mlp.shared_expert.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
}


def read(said: dict[str, Any]) -> Any:
    return config.read({"quantization_config": said})


def layers(**algorithms: Any) -> dict[str, Any]:
    return {**MIXED, "quantized_layers": algorithms}


def test_each_layer_says_its_own() -> None:
    made, at = read(MIXED), "model.language_model.layers"
    assert made.scheme(f"{at}.0.mlp.experts.17.down_proj") == Fp4Scheme("modelopt"), "a name stands for its parts too"
    assert made.scheme(f"{at}.3.self_attn.q_proj") == Fp8Scheme("static")
    assert made.scheme("lm_head") == Fp4Scheme("modelopt")
    assert made.scheme(f"{at}.3.self_attn.k_proj") is None, "what is not named is stored as it is"
    assert made.scheme(f"{at}.0.mlp.experts_of_another_kind") is None
    assert made.scheme("mtp.layers.0.self_attn.q_proj") is None


def test_the_nearest_name_holds_and_what_is_left_out_is_left_out() -> None:
    said = layers(a={"quant_algo": "FP8"}, **{"a.b": {"quant_algo": "mxfp8"}, "a.b.c": {"quant_algo": "FP8_PB_WO"}})
    made = read({**said, "exclude_modules": ["a.x*"]})
    assert [made.scheme(name) for name in ("a.q", "a.b.q", "a.b.c", "a.x", "b")] == [
        Fp8Scheme("static"),
        MXFP8,
        BLOCKS,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("algorithm", "other", "scheme"),
    [
        ("FP8_PB_WO", {}, BLOCKS),
        ("fp8_pb_wo", {"group_size": 128}, BLOCKS),
        ("FP8_PB_WO", {"group_size": [128, 128]}, BLOCKS),
        ("MXFP8", {"group_size": 32}, MXFP8),
    ],
)
def test_algorithms_for_all_layers(algorithm: str, other: dict[str, Any], scheme: Fp8Scheme) -> None:
    made = read({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **other})
    assert made.scheme("model.layers.0.mlp.up_proj") == scheme
    assert made.scheme("lm_head") is None


# As modelopt 0.29 turned hf_quant_config.json into config.json's form, and that file as it is.
EARLY = {"quant_library": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8", "ignore": ["lm_head"]}
WHOLE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
# What TensorRT-LLM's form says of an algorithm that needs none of these.
UNUSED = {"has_zero_point": False, "pre_quant_scale": False, "group_size": None, "smoothquant_val": None}


@pytest.mark.parametrize(
    "said",
    [
        EARLY,
        WHOLE,
        {"quant_method": "modelopt", **WHOLE},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"], **UNUSED},
        {**layers(**{"model.layers.0.mlp.up_proj": {"quant_algo": "FP8", **UNUSED}}), **UNUSED},
    ],
)
def test_early_exports_and_keys_that_say_nothing(said: dict[str, Any]) -> None:
    made = read(said)
    assert made.scheme("model.layers.0.mlp.up_proj") == Fp8Scheme("static")
    assert made.scheme("lm_head") is None


def test_weights_are_as_they_are_where_the_cache_alone_is_quantized() -> None:
    assert read({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}) is None


def test_fbgemm_bounds_the_inputs_of_rows() -> None:
    """By the keys that transformers and vLLM read; modules left out are named one by one."""
    left_out = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.125"]
    made = read({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": left_out})
    assert made.scheme("model.layers.1.mlp.up_proj") == Fp8Scheme("dynamic by token", largest=1200.0)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.125.mlp.up_proj"):
        assert made.scheme(name) is None
    assert read({"quant_method": "fbgemm_fp8"}).scheme("a") == Fp8Scheme("dynamic by token", largest=1200.0)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (layers(), "needs quantized_layers, which name what is quantized"),
        (layers(a={"quant_algo": "W4A8_AWQ"}), "quantized_layers: a: quant_algo = 'W4A8_AWQ' is not implemented"),
        (layers(a={"quant_algo": "MIXED_PRECISION"}), "quant_algo = 'MIXED_PRECISION' is not implemented"),
        (layers(a={"quant_algo": "NVFP4", "group_size": 32}), "quantized_layers: a: group_size = 32"),
        (layers(a={"quant_algo": "FP8", "pre_quant_scale": True}), "quantized_layers: a: pre_quant_scale = True"),
        (layers(a={"quant_algo": "NVFP4", "has_zero_point": True}), "quantized_layers: a: has_zero_point = True"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "multiplied by pre_quant_scale .* Use a checkpoint"),
        ({"quant_method": "modelopt", "quant_algo": None}, "lacks quant_algo"),
        ({**WHOLE, "quant_method": "gptq"}, "gptq|bits"),
        (layers(a=3), "quantized_layers: a must be an object"),
        (layers(**{"a.*": {"quant_algo": "FP8"}}), r"quantized_layers: a\.\*: a name is needed"),
        ({**MIXED, "quantized_layers": None}, "quantized_layers"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64}, "group_size = 64"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 128}, "group_size = 128"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo = 'INT4_AWQ' .* MIXED_PRECISION"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 0}, "activation_scale_ub"),
        ({"quant_method": "fbgemm_fp8", "activation_scheme": "static"}, "activation_scheme = 'static'"),
    ],
)
def test_what_is_not_implemented_is_named(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(said)
