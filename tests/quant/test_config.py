"""What a config.json says of quantized weights: read by module, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.reader import ConfigError
from engine.quant import config
from engine.quant.scheme import Fp8Scheme
from tests.gate.packings import float_quantized

ROWS = float_quantized("channel", strategy="token", dynamic=True)
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


def changed(**changes: Any) -> dict[str, Any]:
    return {**ROWS, **changes}


def weights(**changes: Any) -> dict[str, Any]:
    group = ROWS["config_groups"]["group_0"]
    return changed(config_groups={"group_0": {**group, "weights": {**group["weights"], **changes}}})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"quant_method": "hqq"}, "quant_method = 'hqq' is not implemented; implemented: 'awq', 'compr"),
        ({}, "lacks quant_method"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "go with blocks"),
        ({"quant_method": "fp8", "surprise": 1}, "surprise = 1"),
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
    ],
)
def test_what_is_not_implemented_is_named(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(said)
