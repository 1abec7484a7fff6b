"""What the metadata of GGUF files says becomes the config.json of the model; what is not implemented is named."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.gguf_file import FORMATS, GgufFile, Tensor
from engine.models import registry
from engine.models.gguf import config
from engine.models.gguf.names import LAYOUTS
from engine.models.reader import ConfigError
from tests import gguf_files

LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 131072,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 128,
    "llama.vocab_size": 3,
}
DEEPSEEK = {
    "deepseek2.block_count": 27,
    "deepseek2.context_length": 163840,
    "deepseek2.embedding_length": 2048,
    "deepseek2.feed_forward_length": 10944,
    "deepseek2.attention.head_count": 16,
    "deepseek2.attention.head_count_kv": 16,
    "deepseek2.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.attention.key_length": 192,
    "deepseek2.attention.value_length": 128,
    "deepseek2.rope.freq_base": 10000.0,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 4096,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.0706999972462654,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.expert_count": 64,
    "deepseek2.expert_used_count": 6,
    "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_feed_forward_length": 1408,
    "deepseek2.expert_weights_scale": 1.0,
    "deepseek2.vocab_size": 3,
}
# Every layout has these: files without them are named by the loader.
DENSE = {"output", "ffn_gate", "ffn_up", "ffn_down"}
ROPE = {"rope_theta": 5e5, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def made(metadata: dict[str, Any], frequencies: Any = None, **own: Any) -> dict[str, Any]:
    name = next(iter(metadata)).split(".")[0]
    embedding = Tensor("token_embd.weight", Path("m.gguf"), 0, FORMATS[0], (3, 32))
    said = {**metadata, **{f"{name}.{key.replace('__', '.')}": value for key, value in own.items()}}
    held = GgufFile(
        {"general.architecture": name, "tokenizer.ggml.tokens": ("a", "b", "c"), **said},
        {"token_embd.weight": embedding},
    )
    return config.config(held, "m.gguf", [2], frequencies)


def divisors(factor: float) -> tuple[float, ...]:
    rope = {"rope_parameters": {**ROPE, "factor": factor}, "head_dim": 128}
    return tuple(map(float, gguf_files.divisors(rope)))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_scaling_is_told_by_its_divisors(factor: float) -> None:
    values = made(LLAMA, divisors(factor))
    scaling = values["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"], scaling["original_max_position_embeddings"]) == (
        "llama3",
        factor,
        8192,
    )
    assert values["rms_norm_eps"] == 1e-5, "the number that was written into 32 bits"
    model = registry.parse(values)
    assert model.eos_ids == (2,)
    assert len(model.layers) == 2


def test_deepseek_of_before_latent_caches_and_of_today_are_one_model() -> None:
    old = made(DEEPSEEK)
    new = made(
        DEEPSEEK,
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    assert old == new
    assert old["architectures"] == ["DeepseekV2ForCausalLM"]
    assert old["rope_scaling"]["mscale_all_dim"] == 0.707
    mixer: Any = registry.parse(old).layers[0].mixer
    assert (mixer.nope_dim, mixer.rope_dim, mixer.value_dim, mixer.rope.attention_factor) == (128, 64, 128, 1.0)


QWEN_CODER = {
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 262144,
    "qwen3moe.embedding_length": 2048,
    "qwen3moe.feed_forward_length": 5472,
    "qwen3moe.attention.head_count": 32,
    "qwen3moe.attention.head_count_kv": 4,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.attention.value_length": 128,
    "qwen3moe.rope.freq_base": 10000000.0,
    "qwen3moe.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "qwen3moe.expert_count": 128,
    "qwen3moe.expert_used_count": 8,
    "qwen3moe.expert_feed_forward_length": 768,
    "qwen3moe.expert_shared_feed_forward_length": 0,
}


def test_qwen3_coder_says_that_it_has_no_shared_experts() -> None:
    layer: Any = registry.parse(made(QWEN_CODER)).layers[0]
    assert (layer.ffn.num_experts, layer.ffn.intermediate, layer.ffn.num_shared) == (128, 768, 0)


@pytest.mark.parametrize(
    ("metadata", "own", "why"),
    [
        (QWEN_CODER, {"expert_shared_feed_forward_length": 512}, "expert_shared_feed_forward_length = 512"),
        (LLAMA, {"expert_count": 8}, "expert_count = 8 is not implemented"),
        (LLAMA, {"rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope' is not implemented"),
        (LLAMA, {"attention__sliding_window": 4096}, "attention.sliding_window = 4096"),
        (LLAMA, {"vocab_size": 4}, "vocab_size = 4 is not implemented"),
        (LLAMA, {"rope__dimension_count": 64}, "rope.dimension_count = 64"),
        (DEEPSEEK, {"expert_gating_func": 3}, "expert_gating_func = 3"),
        (DEEPSEEK, {"rope__scaling__type": "linear"}, "rope.scaling.type must be yarn or none"),
        ({"falcon.block_count": 2}, {}, "architecture falcon, 1 tensors (1 F32); that architecture is not implemented"),
    ],
)
def test_what_is_not_implemented_is_named(metadata: dict[str, Any], own: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        made(metadata, **own)


def test_sampling_that_a_file_recommends_is_that_of_a_generation_config() -> None:
    temp = struct.unpack("<f", struct.pack("<f", 0.7))[0]
    said = {"general.sampling.temp": temp, "general.sampling.top_k": 20, "general.sampling.mirostat": 0}
    assert config.generation(GgufFile(said, {})) == {"temperature": 0.7, "top_k": 20}
    assert config.generation(GgufFile({}, {})) == {}


def test_other_frequencies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs.weight is not what Llama 3's scaling gives"):
        made(LLAMA, tuple(1.0 + i / 64 for i in range(64)))


def test_every_architecture_has_tensors_that_the_package_knows() -> None:
    assert set(LAYOUTS) == set(config.ARCHITECTURES)
    for name, layout in LAYOUTS.items():
        held = GgufFile({"general.architecture": name, f"{name}.attention.head_count": 8}, {})
        arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        known = {gguf.TENSOR_NAMES[kind].replace("blk.{bid}.", "") for kind in gguf.MODEL_TENSORS[arch]}
        read = layout(held)
        assert {*read.outer, *read.layer, *read.experts, *read.bare} <= known | DENSE
