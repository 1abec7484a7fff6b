"""A shape on disk is one that the engine serves with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engine.config import CacheConfig, EngineConfig, RuntimeConfig
from engine.models import registry
from engine.runner.build import build_runner
from kernels.weight import Fp8, PackedInt
from perf import shapes


def test_layers_and_positions_change_and_nothing_else_does(tmp_path: Path) -> None:
    whole = json.loads((shapes.write(tmp_path / "whole", "tiny") / "config.json").read_text())
    cut = json.loads((shapes.write(tmp_path / "cut", "tiny", layers=1, positions=4096) / "config.json").read_text())
    assert cut == {**whole, "num_hidden_layers": 1, "max_position_embeddings": 4096}


def test_lists_with_an_entry_for_each_layer_are_cut_too(tmp_path: Path) -> None:
    source = tmp_path / "published"
    source.mkdir()
    config = {**shapes.SHAPES["tiny"], "num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"], "eos": [1]}
    (source / "config.json").write_text(json.dumps(config))
    made = json.loads((shapes.write(tmp_path / "made", str(source), layers=3) / "config.json").read_text())
    assert made["layer_types"] == ["a", "b", "c"]
    assert made["eos"] == [1]


@pytest.mark.parametrize(("quantization", "kind"), [("fp8", Fp8), ("w4a16", PackedInt)])
def test_a_shape_is_quantized_and_served(quantization: str, kind: type, tmp_path: Path) -> None:
    folder = shapes.write(tmp_path, "tiny", quantization=quantization)
    assert folder.name == f"tiny-{quantization}"
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        max_model_len=64,
        cache=CacheConfig(num_blocks=8),
        runtime=RuntimeConfig(device="cpu"),
    )
    weights = build_runner(config).decoder.weights
    assert {type(weight.value) for name, weight in weights.items() if "embed" not in name} == {kind}
    with pytest.raises(ValueError, match="quantized as its config"):
        shapes.write(tmp_path / "again", str(folder), quantization=quantization)


@pytest.mark.parametrize("quantization", list(shapes.QUANTIZATIONS))
def test_routers_of_quantized_mixtures_are_left_out_by_name(quantization: str, tmp_path: Path) -> None:
    mixture = Path(__file__).parents[1] / "models" / "configs" / "qwen3-30b-a3b.json"
    folder = shapes.write(tmp_path, str(mixture), layers=2, quantization=quantization)
    method = registry.quantization(folder)
    assert method is not None
    assert method.scheme("model.layers.1.mlp.gate") is None
    for module in ("self_attn.q_proj", "mlp.experts.3.gate_proj", "mlp.experts.3.down_proj"):
        assert method.scheme(f"model.layers.1.{module}") is not None


def test_what_deepseek_v4_leaves_as_it_is_is_said(tmp_path: Path) -> None:
    published = Path(__file__).parents[1] / "models" / "configs" / "deepseek-v4-flash.json"
    folder = shapes.write(tmp_path, str(published), layers=4)
    method = registry.quantization(folder)
    assert method is not None
    left = {f"attn.{module}" for module in ("compressor.wkv", "indexer.compressor.wgate", "indexer.weights_proj")}
    held = {"attn.wq_a", "attn.indexer.wq_b", "attn.wo_a", "ffn.experts.3.w1", "ffn.shared_experts.w2"}
    assert {module for module in left | held if method.scheme(f"model.layers.2.{module}") is None} == left


def test_the_tokenizer_names_every_token_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = shapes.write(tmp_path, "tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == shapes.SHAPES["tiny"]["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))
