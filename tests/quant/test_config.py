"""What a config.json says of quantized weights: read by module, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.models import registry
from engine.models.reader import ConfigError
from engine.quant import config
from engine.quant.scheme import Fp8Scheme, PackedScheme, Scheme
from tests.gate.fp8 import float_quantized

ROWS = float_quantized("channel", strategy="token", dynamic=True)
GPTQ, AWQ = PackedScheme("gptq", 4, 128, zeros=True, shift=1), PackedScheme("awq", 4, 128, zeros=True)
BY_TOKEN, BY_BLOCK = Fp8Scheme("dynamic by token"), Fp8Scheme("dynamic by 128", (128, 128))


def read(said: dict[str, Any]) -> Any:
    return config.read({"quantization_config": said})


def test_a_config_without_quantization_says_nothing() -> None:
    assert config.read({}) is None
    assert config.read({"quantization_config": None, "text_config": {}}) is None


def test_a_text_model_may_say_it_and_must_not_say_something_else() -> None:
    inner = {"text_config": {"quantization_config": ROWS}}
    made = config.read(inner)
    assert made is not None
    assert made.scheme("model.layers.0.mlp.up_proj") == BY_TOKEN
    assert config.read({**inner, "quantization_config": ROWS}) == made
    with pytest.raises(ConfigError, match="say different things"):
        config.read({**inner, "quantization_config": {"quant_method": "fp8"}})


def test_modules_that_are_left_out_by_name_with_their_parts() -> None:
    made = read({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]})
    assert made.scheme("lm_head") is None
    assert made.scheme("model.layers.1.mlp.gate_proj") is None
    assert made.scheme("model.layers.10.mlp.gate_proj") == BY_TOKEN


def test_blocks_were_written_as_text_before() -> None:
    said = float_quantized("block", strategy="group", group_size=128, dynamic=True)
    weights = {**said["config_groups"]["group_0"]["weights"], "block_structure": "128x128"}
    group = {**said["config_groups"]["group_0"], "weights": weights}
    assert read({**said, "config_groups": {"group_0": group}}) == read(said)


def test_targets_by_name_go_before_patterns_and_those_before_classes() -> None:
    groups = {
        "by class": ROWS["config_groups"]["group_0"],
        "by pattern": {
            **float_quantized("block", strategy="group", group_size=128, dynamic=True)["config_groups"]["group_0"],
            "targets": [r"re:.*self_attn\..*", "model.layers.0.mlp.up_proj"],
        },
        "by name": {**ROWS["config_groups"]["group_0"], "targets": ["model.layers.0.self_attn.q_proj"]},
    }
    made = read({**ROWS, "config_groups": groups, "ignore": ["re:model.layers.1.mlp"]})
    assert made.scheme("model.layers.0.mlp.down_proj") == BY_TOKEN
    assert made.scheme("model.layers.0.mlp.up_proj") == BY_BLOCK
    assert made.scheme("model.layers.0.self_attn.k_proj") == BY_BLOCK
    assert made.scheme("model.layers.0.self_attn.q_proj") == BY_TOKEN
    assert made.scheme("model.layers.1.mlp.up_proj") is None, "a pattern matches from the beginning"
    assert made.scheme("other.model.layers.1.mlp") == BY_TOKEN


def test_an_embedding_is_meant_by_its_class_or_by_its_name() -> None:
    group = ROWS["config_groups"]["group_0"]
    for targets in (["Linear", "Embedding"], ["Linear", "re:.*embed_tokens"]):
        made = read({**ROWS, "config_groups": {"group_0": {**group, "targets": targets}}})
        assert made.scheme("model.embed_tokens") == made.scheme("model.layers.0.mlp.up_proj") == BY_TOKEN
    assert read(ROWS).scheme("model.embed_tokens") is None
    one = {**group, "targets": ["Embedding"]}
    assert read({**ROWS, "config_groups": {"group_0": one}}).scheme("model.layers.0.mlp.up_proj") is None


def test_sparse_weights_are_read_where_their_zeros_are_stored() -> None:
    """As the first releases of llm-compressor wrote it of every checkpoint."""
    said = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured", "targets": []}
    made = read({**ROWS, "sparsity_config": {**said, "registry_requires_subclass": False, "ignore": []}})
    assert made.scheme("model.layers.0.mlp.up_proj") == BY_TOKEN


# What transformers 5 writes of every checkpoint that it saves with weights by GPTQ or AWQ.
AS_SAVED = {
    "bits": 4, "tokenizer": None, "dataset": None, "group_size": 128, "damp_percent": 0.1, "desc_act": False,
    "act_group_aware": True, "sym": True, "true_sequential": True, "meta": None, "backend": "auto",
    "model_seqlen": None, "block_name_to_quantize": None, "module_name_preceding_first_block": None, "batch_size": 1,
    "pad_token_id": None, "max_input_length": None, "cache_block_outputs": True, "modules_in_block_to_quantize": None,
}  # fmt: skip
# What GPTQModel 7 does, and of GPTQ's what AutoRound adds.
BY_GPTQMODEL = {"bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {}}
BY_AUTOROUND = {
    "data_type": "int",
    "provider": "auto-round",
    "autoround_version": "0.16.1",
    "iters": 200,
    "lr": 0.005,
    "minmax_lr": 0.005,
}
NAMED_GPTQ = {"quant_method": "gptq", "method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2"}
NAMED_AWQ = {"quant_method": "awq", "method": "awq", "format": "gemm", "checkpoint_format": "gemm", "version": "gemm"}
SAVED_FP8 = {"modules_to_convert": None, "weight_block_size": [128, 128], "dequantize": False, "scale_fmt": "float"}


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        ({**AS_SAVED, "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq"}, GPTQ),
        ({**BY_GPTQMODEL, **NAMED_GPTQ, "sym": True}, replace(GPTQ, shift=0)),
        ({**BY_GPTQMODEL, "quant_method": "gptq", "format": "gptq_v2"}, replace(GPTQ, shift=0)),
        ({**BY_GPTQMODEL, **BY_AUTOROUND, "quant_method": "gptq"}, GPTQ),
        ({**AS_SAVED, "quant_method": "awq", "zero_point": True, "format": "gemm", "version": "gemm"}, AWQ),
        ({**BY_GPTQMODEL, **NAMED_AWQ, "zero_point": True}, AWQ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, AWQ),
        ({**ROWS, "run_compressed": True}, BY_TOKEN),
        ({**SAVED_FP8, "quant_method": "fp8", "activation_scheme": "dynamic", "expert_dtype": "fp8"}, BY_BLOCK),
    ],
)
def test_what_libraries_write_today_is_read(said: dict[str, Any], scheme: Scheme) -> None:
    assert read(said).scheme("model.layers.0.mlp.up_proj") == scheme


def test_a_head_may_be_stored_by_awq_too() -> None:
    said = {**BY_GPTQMODEL, **NAMED_AWQ}
    assert read({**said, "lm_head": True}).scheme("lm_head") == AWQ
    assert read(said).scheme("lm_head") is None


# As AutoRound 0.16 writes it.
AUTO_ROUND = {
    "autoround_version": "0.16.1", "bits": 4, "block_name_to_quantize": "model.layers", "data_type": "int",
    "enable_quanted_input": False, "group_size": 128, "packing_format": "auto_round:auto_gptq", "sym": True,
    "quant_method": "auto-round",
}  # fmt: skip


def test_auto_rounds_modules_by_name_and_by_pattern() -> None:
    own = {
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64},
        "model.layers.1.mlp.up_proj": {"bits": 16},
        r".*model\.layers\.\d\.mlp\.gate.*": {"bits": 16, "data_type": "float"},
        "lm_head": {
            "bits": 4,
            "group_size": 32,
            "data_type": "int",
            "act_bits": 16,
            "act_dynamic": True,
            "act_sym": True,
        },
    }
    made = read({**AUTO_ROUND, "extra_config": own})
    assert made.scheme("model.layers.0.mlp.up_proj") == GPTQ
    assert made.scheme("model.layers.0.mlp.down_proj") == replace(GPTQ, bits=8, group=64)
    assert made.scheme("model.layers.1.mlp.up_proj") is None
    assert made.scheme("model.layers.1.mlp.gate") is None
    assert made.scheme("lm_head") == replace(GPTQ, group=32)
    assert read(AUTO_ROUND).scheme("lm_head") is None
    for name in ("auto_round:auto_awq", "auto_round:awq"):
        awq = read({**AUTO_ROUND, "packing_format": name, "sym": False})
        assert awq.scheme("model.layers.0.mlp.up_proj") == AWQ


@pytest.mark.parametrize("backend", ["auto_round:gptq:exllamav2", "auto_round:auto_gptq"])
def test_auto_round_named_a_kernel_behind_the_packing_before(backend: str) -> None:
    before = {key: value for key, value in AUTO_ROUND.items() if key != "packing_format"}
    made = read({**before, "quant_method": "intel/auto-round", "backend": backend, "quant_lm_head": True})
    assert made.scheme("model.layers.0.mlp.up_proj") == GPTQ
    assert made.scheme("lm_head") == GPTQ
    assert made.scheme("model.embed_tokens") is None
    with pytest.raises(ConfigError, match=r"backend = 'auto_round:exllamav2' is not implemented"):
        read({**before, "backend": "auto_round:exllamav2"})


def test_auto_round_without_a_model_says_so_and_dtypes_of_scales_change_nothing() -> None:
    own = {"model.layers.0.mlp.down_proj": {"bits": 8, "scale_dtype": "torch.float16"}}
    made = read({**AUTO_ROUND, "packing_format": "auto_round:gptq", "model_free": True, "extra_config": own})
    assert made.scheme("model.layers.0.mlp.down_proj") == replace(GPTQ, bits=8)
    assert made.scheme("model.layers.0.mlp.up_proj") == GPTQ


@pytest.mark.parametrize(
    ("name", "said", "scheme"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "damp_percent": 0.01}, GPTQ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, AWQ),
    ],
)
def test_the_file_of_a_library_says_it_where_config_json_is_silent(
    tmp_path: Path, name: str, said: dict[str, Any], scheme: Scheme
) -> None:
    """As AutoGPTQ and AutoAWQ wrote it before transformers knew of them."""
    (tmp_path / name).write_text(json.dumps(said))
    (tmp_path / "config.json").write_text("{}")
    made = registry.quantization(tmp_path)
    assert made is not None
    assert made.scheme("model.layers.0.mlp.up_proj") == scheme
    (tmp_path / name).write_text(json.dumps({**said, "surprise": 1}))
    with pytest.raises(ConfigError, match=rf"{name}: quantization holds .* surprise = 1"):
        registry.quantization(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": ROWS}))
    assert registry.quantization(tmp_path) == read(ROWS)


def changed(**changes: Any) -> dict[str, Any]:
    return {**ROWS, **changes}


def weights(**changes: Any) -> dict[str, Any]:
    group = ROWS["config_groups"]["group_0"]
    return changed(config_groups={"group_0": {**group, "weights": {**group["weights"], **changes}}})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"quant_method": "hqq"}, "quant_method = 'hqq' is not implemented; implemented: 'auto-round', 'awq', 'compr"),
        ({}, "lacks quant_method"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "go with blocks"),
        ({"quant_method": "fp8", "surprise": 1}, "surprise = 1"),
        ({"quant_method": "fp8", "dequantize": True}, "dequantize = True"),
        ({"quant_method": "fp8", "expert_dtype": "int4"}, "expert_dtype = 'int4'"),
        (
            {**BY_GPTQMODEL, **NAMED_GPTQ, "format": "gptq"},
            "format = 'gptq' is not implemented; implemented: 'gptq_v2'",
        ),
        ({**BY_GPTQMODEL, **NAMED_GPTQ, "data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({**BY_GPTQMODEL, **NAMED_GPTQ, "rotation": "hadamard"}, "rotation = 'hadamard'"),
        ({**BY_GPTQMODEL, **NAMED_AWQ, "desc_act": True}, "desc_act = True"),
        ({**BY_GPTQMODEL, **NAMED_AWQ, "format": "gemv"}, "format = 'gemv'"),
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8_static"}, "packing_format = 'auto_round:fp8_static'"),
        ({**AUTO_ROUND, "bits": 16}, "bits = 16 is not implemented"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits = 8"),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "bits": 8}, "bits = 8"),
        ({**AUTO_ROUND, "rotation_config": {}, "extra_config": {"a": {"bits": 8, "x": 1}}}, "extra_config: a .* x = 1"),
        ({**AUTO_ROUND, "extra_config": {"a": 8}}, "extra_config: a must be an object"),
        (changed(format="marlin-24"), "group_0: format = 'marlin-24' is not implemented"),
        (changed(kv_cache_scheme=8), "kv_cache_scheme = 8"),
        (changed(transform_config={"R1": {}}), "transform_config"),
        (changed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format = 'sparse-24-bitmask'"),
        (changed(sparsity_config={"format": "dense", "surprise": 1}), "surprise = 1"),
        (changed(ignore=["re:("]), "no regular expression"),
        (changed(config_groups={"group_0": 3}), "group_0 must be an object"),
        (weights(num_bits=4), "weights: num_bits = 4"),
        (weights(type="int"), "weights: type = 'int'"),
        (weights(symmetric=False), "symmetric = False"),
        (weights(strategy="block", block_structure=[64, 128]), r"block_structure = \[64, 128\]"),
        (weights(strategy="block", block_structure="64x128"), "block_structure = '64x128'"),
    ],
)
def test_what_is_not_implemented_is_named(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(said)
