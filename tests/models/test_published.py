"""Published configs of every family: what is read from them, what each layer keeps, and that rules fill every
parameter. Weights are not needed for any of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.spec import Recurrent, group_layers, window_of
from engine.layers.build_context import BuildContext
from engine.models import registry
from engine.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    SparseAttentionConfig,
)
from engine.models.decoder import Decoder
from engine.models.parts import with_shared_apart
from engine.models.reader import ConfigError
from engine.quant import config as quantization
from engine.quant.plan import plan, shared_apart
from kernels.select import select
from kernels.workspace import Workspace

CONFIGS = Path(__file__).parent / "configs"
SERVED = sorted(file.stem for file in CONFIGS.glob("*.json"))
MIB = 1 << 20


def values(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def parse(name: str, **changes: Any) -> ModelConfig:
    return registry.parse({**values(name), **changes})


def decoder(config: ModelConfig) -> Decoder:
    """Without memory: parameters are shapes."""
    cpu = torch.device("cpu")
    return Decoder(BuildContext(select(Workspace(cpu)), config, torch.bfloat16, cpu, max_model_len=8))


@pytest.mark.parametrize("name", SERVED)
def test_rules_fill_every_parameter_once(name: str) -> None:
    config, method, family = parse(name), quantization.read(values(name)), registry.family_of(values(name))
    if shared_apart(family.rules(config), None, method):
        config = with_shared_apart(config)
    model = decoder(config)
    rules = family.rules(config)
    sources = [source for rule in rules for source in rule.sources]
    assert len(sources) == len(set(sources))
    targets = Counter(rule.target for rule in plan(model.weights, rules, None, method))
    parameters = set(dict(model.named_parameters()))
    assert set(targets) == parameters
    assert set(targets.values()) == {1}


@pytest.mark.parametrize(
    ("name", "mixers", "ffns"),
    [
        ("llama-3.1-8b", {AttentionConfig: 32}, {MlpConfig: 32}),
        ("mistral-7b-v0.1", {AttentionConfig: 32}, {MlpConfig: 32}),
        ("qwen3-30b-a3b", {AttentionConfig: 48}, {MoeConfig: 48}),
        ("gemma3-1b", {AttentionConfig: 26}, {MlpConfig: 26}),
        ("qwen3.5-4b", {GatedDeltaConfig: 24, AttentionConfig: 8}, {MlpConfig: 32}),
        ("deepseek-v2-lite", {LatentAttentionConfig: 27}, {MlpConfig: 1, MoeConfig: 26}),
        ("kimi-k2-instruct-as-deepseek_v3", {LatentAttentionConfig: 61}, {MlpConfig: 1, MoeConfig: 60}),
        ("deepseek-v4-flash-bf16", {SparseAttentionConfig: 43}, {MoeConfig: 43}),
        ("gpt-oss-20b", {AttentionConfig: 24}, {MoeConfig: 24}),
        ("gpt-oss-120b", {AttentionConfig: 36}, {MoeConfig: 36}),
    ],
)
def test_layers(name: str, mixers: dict[type, int], ffns: dict[type, int]) -> None:
    layers = parse(name).layers
    assert Counter(type(layer.mixer) for layer in layers) == mixers
    assert Counter(type(layer.ffn) for layer in layers) == ffns


def test_a_text_config_inside_a_larger_one_is_the_same_model() -> None:
    inner, outer = parse("qwen3.5-4b-text"), parse("qwen3.5-4b")
    assert outer.layers == inner.layers
    assert (inner.prefix, outer.prefix) == ("model", "model.language_model")


@pytest.mark.parametrize("name", ["KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"])
def test_the_text_model_of_kimi_k2_5_is_that_of_kimi_k2(name: str) -> None:
    inner = {**values("kimi-k2-instruct-as-deepseek_v3"), "model_type": "kimi_k2", "rms_norm_eps": 1e-5}
    outer = {
        "architectures": [name],
        "model_type": "kimi_k25",
        "text_config": inner,
        "vision_config": {"hidden_size": 1152},
        "media_placeholder_token_id": 163605,
        "torch_dtype": "bfloat16",
    }
    assert registry.parse(outer).layers == registry.parse(inner).layers
    rename = registry.rename(registry.family_of(outer))
    assert rename("language_model.model.layers.0.mlp.gate.weight") == "model.layers.0.mlp.gate.weight"
    assert rename("model.language_model.layers.0.mlp.gate.weight") == "model.layers.0.mlp.gate.weight"
    assert rename("language_model.lm_head.weight") == "lm_head.weight"
    assert rename("model.norm.weight") == "model.norm.weight"


def test_what_gemma_leaves_out_is_what_transformers_takes_for_it() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Gemma3Config(**values("gemma3-4b")).text_config
    ours = parse("gemma3-4b")
    mixers = [layer.mixer for layer in ours.layers]
    for mixer, kind in zip(mixers, theirs.layer_types, strict=True):
        assert isinstance(mixer, AttentionConfig)
        assert mixer.rope is not None
        assert mixer.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        assert mixer.rope.theta == theirs.rope_parameters[kind]["rope_theta"]
        assert mixer.rope.factor == theirs.rope_parameters[kind].get("factor", 1.0)
        assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8, theirs.num_key_value_heads, theirs.head_dim)
        assert mixer.scale == theirs.query_pre_attn_scalar**-0.5
    assert (ours.vocab_size, ours.max_position) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.tied, ours.dtype, ours.eos_ids) == (True, "bfloat16", (1, 106))


def test_a_gemma_with_a_vision_tower_has_a_head_of_its_own_when_it_says_so() -> None:
    config = {**values("gemma3-4b"), "tie_word_embeddings": False}
    assert not registry.parse(config).tied
    rename = registry.rename(registry.family_of(config))
    assert rename("language_model.lm_head.weight") == "lm_head.weight"
    config["text_config"]["final_logit_softcapping"] = 30.0  # which transformers passes over in this class alone
    with pytest.raises(ConfigError, match=r"final_logit_softcapping = 30\.0"):
        registry.parse(config)


@pytest.mark.parametrize("wrapped", ["qwen3.5-4b", "gemma3-4b"])
def test_what_only_the_larger_model_says_holds_for_its_text_model(wrapped: str) -> None:
    config = values(wrapped)
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k not in ("dtype", "eos_token_id")}
    config |= {"dtype": "float16", "eos_token_id": [3, 5]}
    assert registry.parse(config).dtype == "float16"
    assert registry.parse(config).eos_ids == (3, 5)
    with pytest.raises(ConfigError, match="quantization_config"):
        registry.parse({**config, "quantization_config": {"quant_method": "hqq"}})


def test_absent_keys_mean_what_transformers_takes_for_them() -> None:
    def without(name: str, *keys: str) -> ModelConfig:
        return registry.parse({key: value for key, value in values(name).items() if key not in keys})

    for name, keys in {
        "mistral-7b-v0.1": ("sliding_window", "num_key_value_heads"),
        "qwen3-4b": ("head_dim",),
        "qwen3-30b-a3b": ("num_key_value_heads",),
        "gemma3-1b": ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "head_dim"),
    }.items():
        assert without(name, *keys) == parse(name)
    experts = without("kimi-k2-instruct-as-deepseek_v3", "n_group", "topk_group", "routed_scaling_factor").layers[1].ffn
    assert isinstance(experts, MoeConfig)
    assert (experts.num_groups, experts.top_groups, experts.scale) == (8, 4, 2.5)


def test_entries_are_stretched_however_the_config_spells_it() -> None:
    config = values("deepseek-v4-flash-bf16")
    scaling = config.pop("rope_scaling")
    flat = {**config, "rope_parameters": scaling}
    assert registry.parse(flat) == parse("deepseek-v4-flash-bf16")
    main = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.125}
    nested = {"main": main, "compress": {**scaling, "rope_theta": 160000, "attention_factor": 1.0}}
    mixers = [layer.mixer for layer in registry.parse({**config, "rope_parameters": nested}).layers]
    assert isinstance(mixers[0], SparseAttentionConfig)
    assert mixers[0].rope.theta == 500.0
    assert mixers[2] == parse("deepseek-v4-flash-bf16").layers[2].mixer


def test_layers_that_predict_ahead_are_left_out_as_many_as_there_are() -> None:
    name = "kimi-k2-instruct-as-deepseek_v3"
    family = registry.family_of(values(name))
    assert "model.layers.61.*" in registry.unused(family, parse(name, num_nextn_predict_layers=1))
    fewer = registry.unused(family, parse(name, num_hidden_layers=60))
    assert not any(pattern.startswith("model.layers") for pattern in fewer)


def test_gemma_has_a_window_and_a_rotary_base_of_its_own_in_five_layers_of_six() -> None:
    mixers = [layer.mixer for layer in parse("gemma3-1b").layers]
    kinds = [(m.window, m.rope.theta) for m in mixers if isinstance(m, AttentionConfig) and m.rope]
    assert kinds == [(None, 1e6) if i % 6 == 5 else (512, 1e4) for i in range(26)]


def test_what_the_larger_gemmas_leave_out_is_as_transformers_has_it() -> None:
    """Their configs name sizes, the window and the stretched rope; the rest is the family's default."""
    said = parse(
        "gemma3-1b",
        vocab_size=262208,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        sliding_window=1024,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert parse("gemma3-4b") == replace(said, prefix="model.language_model")


def test_a_quarter_of_the_channels_turns_where_nothing_else_is_said() -> None:
    said = values("qwen3.5-4b-text")
    said["rope_parameters"] = {k: v for k, v in said["rope_parameters"].items() if k != "partial_rotary_factor"}
    assert registry.parse({k: v for k, v in said.items() if k != "partial_rotary_factor"}) == parse("qwen3.5-4b-text")


def test_yarn_scales_scores_and_not_angles_where_both_mscales_are_equal() -> None:
    mixer = parse("deepseek-v2-lite").layers[0].mixer
    assert isinstance(mixer, LatentAttentionConfig)
    mscale = 0.1 * 0.707 * 3.6888794541139363 + 1  # ln 40
    assert mixer.scale == pytest.approx(192**-0.5 * mscale**2)
    assert mixer.rope.attention_factor == 1.0


def test_compress_ratios_give_the_layer_kinds() -> None:
    config = parse("deepseek-v4-flash-bf16")
    ratios = [layer.mixer.ratio for layer in config.layers if isinstance(layer.mixer, SparseAttentionConfig)]
    assert Counter(ratios) == {0: 2, 4: 21, 128: 20}
    assert [layer.ffn.hashed for layer in config.layers if isinstance(layer.ffn, MoeConfig)] == [True] * 3 + [
        False
    ] * 40
    assert config.block_multiple == 128


# Bytes that a token adds for good, bytes of each window layer's token, and bytes of a request's state: by hand.
COSTS = {
    "qwen3-4b": (36 * 2 * 8 * 128 * 2, 0, 0),
    "llama-3.1-8b": (32 * 2 * 8 * 128 * 2, 0, 0),
    "mistral-7b-v0.1": (0, 32 * 2 * 8 * 128 * 2, 0),
    "mistral-7b-v0.3": (32 * 2 * 8 * 128 * 2, 0, 0),
    "qwen3-30b-a3b": (48 * 2 * 4 * 128 * 2, 0, 0),
    "gemma3-1b": (4 * 2 * 256 * 2, 22 * 2 * 256 * 2, 0),
    "gpt-oss-20b": (12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2, 0),
    "deepseek-v2-lite": (27 * (512 + 64) * 2, 0, 0),
    "kimi-k2-instruct-as-deepseek_v3": (61 * (512 + 64) * 2, 0, 0),
    "qwen3.5-4b": (8 * 2 * 4 * 256 * 2, 0, int(49.5 * MIB)),
    "deepseek-v4-flash-bf16": (
        21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128,
        43 * 512 * 2,
        # values and gates of the open windows, and of the one before where windows overlap
        21 * 8 * 2 * 2 * (512 + 128) * 2 + 20 * 128 * 2 * 512 * 2,
    ),
}


@pytest.mark.parametrize("name", sorted(COSTS))
def test_a_token_costs_what_it_should(name: str) -> None:
    kept, windowed, state = 0, 0, 0
    size = 128
    for group in group_layers(decoder(parse(name)).specs):
        if isinstance(group.spec, Recurrent):
            state += group.spec.bytes_per_request * len(group.layers)
        elif window_of(group.spec) is not None:
            windowed += group.block_bytes(size)
        else:
            kept += group.block_bytes(size)
    assert (kept / size, windowed / size, state) == COSTS[name]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mistral-7b-v0.1", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3-30b-a3b", {"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        ("gemma3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3-1b", {"layer_types": ["chunked_attention"] * 26}, "chunked_attention"),
        ("gemma3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3-1b", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters holds values"),
        ("gemma3-1b", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type = 'linear'"),
        ("gemma3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("mistral-7b-v0.1", {"sliding_window": 0}, "sliding_window = 0"),
        ("mistral-7b-v0.1", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3-30b-a3b", {"num_experts": 10**6}, "num_experts = 1000000 must be an integer from 1 to 4096"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, "mlp_only_layers = [48]"),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["0"]}, "mlp_only_layers holds '0'"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 must be at most 128"),
        ("qwen3.5-4b-text", {"linear_num_value_heads": 24}, "linear_num_value_heads = 24 must be a multiple"),
        ("deepseek-v2-lite", {"rope_scaling": {"type": "yarn", "factor": "40"}}, "factor = '40'"),
        ("kimi-k2-instruct-as-deepseek_v3", {"n_group": 7}, "n_group = 7"),
        ("kimi-k2-instruct-as-deepseek_v3", {"n_group": 4, "topk_group": 8}, "topk_group = 8 must be at most n_group"),
        ("deepseek-v4-flash-bf16", {"compress_ratios": [[0]] * 43}, "compress_ratios holds [0]"),
        ("deepseek-v4-flash-bf16", {"layer_types": ["sliding_attention"] * 43}, "alike where both do"),
        ("deepseek-v4-flash-bf16", {"o_groups": 7}, "num_attention_heads = 64 must be a multiple of o_groups = 7"),
        ("deepseek-v4-flash-bf16", {"n_shared_experts": 2}, "n_shared_experts = 2"),
        ("qwen3.5-4b-text", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3.5-4b-text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek-v2-lite", {"attention_bias": True}, "attention_bias = True"),
        ("kimi-k2-instruct-as-deepseek_v3", {"n_group": None}, "lacks n_group"),
        ("kimi-k2-instruct-as-deepseek_v3", {"routed_scaling_factor": None}, "lacks routed_scaling_factor"),
        ("kimi-k2-instruct-as-deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("kimi-k2-instruct-as-deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("kimi-k2-instruct-as-deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek-v4-flash-bf16", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek-v4-flash-bf16", {"compress_ratios": [0, 8] * 22}, "8"),
        ("deepseek-v4-flash-bf16", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("deepseek-v4-flash-bf16", {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ("llama-3.1-8b", {"architectures": ["FalconForCausalLM"]}, "implemented: DeepseekV2ForCausalLM"),
        ("qwen3-8b", {"quantization_config": {"quant_method": "hqq"}}, "quant_method = 'hqq'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(name, **change)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "part"), [("qwen3-4b", 1.0), ("qwen3.5-4b", 1.0), ("qwen3-30b-a3b", 0.092), ("deepseek-v2-lite", 0.147)]
)
def test_a_token_is_multiplied_by_the_experts_that_it_chose(name: str, part: float) -> None:
    assert decoder(parse(name)).active == pytest.approx(part, abs=0.005)


@pytest.mark.parametrize(
    ("name", "widest"), [("llama-3.1-8b", 14336), ("gemma3-1b", 6912), ("qwen3-30b-a3b", 0), ("deepseek-v2-lite", 0)]
)
def test_the_widest_product_of_all_tokens_is_a_dense_models(name: str, widest: int) -> None:
    """DeepSeek-V2-Lite's first layer is dense, the others' experts decide what a step costs."""
    assert decoder(parse(name)).widest_product == widest
