"""A config value is read with its type, or refused by name; nothing is skipped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.models import registry, rope
from engine.models.reader import ConfigError, Reader

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}


def test_values_have_types() -> None:
    reader = Reader({"n": 3, "x": 2, "flag": True, "nothing": None})
    assert reader.read(int, "n") == 3
    assert reader.read(float, "x") == 2.0
    assert reader.read(int, "nothing", 7) == 7
    with pytest.raises(ConfigError, match=r"n = 3 must be of type str"):
        reader.read(str, "n")
    with pytest.raises(ConfigError, match=r"flag = True must be of type int"):
        reader.read(int, "flag")
    with pytest.raises(ConfigError, match=r"lacks missing"):
        reader.read(int, "missing")


def test_what_nobody_read_is_refused_by_name_and_value() -> None:
    reader = Reader({"hidden_size": 8, "residual_multiplier": 0.22, "use_cache": True, "absent": None})
    reader.read(int, "hidden_size")
    with pytest.raises(ConfigError, match=r"residual_multiplier = 0\.22") as refusal:
        reader.finish()
    assert "use_cache" not in str(refusal.value)
    assert "absent" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "wavelength": 3}}, "rope_scaling.*wavelength = 3"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "attn_factor": 0.9}},
            "attention_factor and attn_factor both say",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attn_factor": 0.9}}, "attn_factor = 0.9"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling lacks low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "two rope types: 'linear', 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "x" * 100_000}}, "^.{0,300}$"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not implemented"),
        ({"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window = True"),
        ({"sliding_window": 512}, "sliding_window = 512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method = 'hqq'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4' must be of type int"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*implemented:.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"architectures": 7}, "architecture 7"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "Qwen3ForCausalLM.*not implemented"),
        ({"model_type": "mixtral"}, "model_type = 'mixtral' is not implemented; implemented: 'qwen3'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must be an integer from 1 to 4096"),
        ({"hidden_size": -64}, "hidden_size = -64 must be"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"),
        ({"head_dim": 31}, "31 of a head's 31 channels are to be rotated"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06 must be greater than 0"),
        ({"rope_theta": 10**400}, "rope_theta = 1000.*must be a finite number"),
        ({"rope_theta": 0}, "rope_theta = 0.0 must be greater than 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling: factor = '4' must be a finite number"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1.0}},
            "rope_scaling and rope_parameters say different things",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor = 1.0 must be greater than low_freq_factor = 4.0",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types holds 1 kinds for num_hidden_layers = 2"),
        ({"layer_types": [["full_attention"]]}, "layer_types holds .* must be of type str"),
        ({"mlp_bias": True}, "mlp_bias = True is not implemented"),
        ({"eos_token_id": 320}, "eos_token_id = 320 must be a token id below 320"),
        ({"torch_dtype": ""}, "dtype = ''"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True is not implemented"),
    ],
)
def test_refusals(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.parse({**QWEN3, **change})


def test_both_spellings_of_rope_are_the_same_rope() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    old = registry.parse({**QWEN3, "rope_scaling": scaling})
    new = {k: v for k, v in QWEN3.items() if k != "rope_theta"}
    assert registry.parse({**new, "rope_parameters": {**scaling, "rope_theta": 1e6}}) == old
    assert old.max_position == 4096


def test_defaults_of_generation_are_not_values_of_the_model() -> None:
    # A config that was written whole, as the text model inside a larger one often is.
    whole = {"do_sample": False, "max_length": 20, "temperature": 1.0, "pruned_heads": {}, "is_decoder": False}
    assert registry.parse({**QWEN3, **whole}) == registry.parse(QWEN3)


LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"]}


def test_positions_of_configs_of_2023() -> None:
    others = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert registry.parse({**others, "max_sequence_length": 2048}).max_position == 2048
    assert registry.parse({**LLAMA, "max_sequence_length": 2048}).max_position == 2048
    with pytest.raises(ConfigError, match="lacks max_position_embeddings"):
        registry.parse(others)


@pytest.mark.parametrize("change", [{"rope_interleaved": True}, {"activation": "gelu"}])
def test_what_says_another_thing_of_a_llama_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} = "):
        registry.parse({**LLAMA, **change})


def test_yarn_extends_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert registry.parse({**QWEN3, "rope_scaling": scaling}).max_position == 16384


def test_yarn_attention_factor() -> None:
    def factor(**more: float) -> float:
        values = {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, **more}, "max_position_embeddings": 4096}
        return rope.from_config(Reader(values), 64).attention_factor

    assert factor() == pytest.approx(1.3688879)  # 0.1 ln 40 + 1
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=0.707, mscale_all_dim=0.707) == 1.0
    assert factor(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(1.3688879 / 1.1844440)
    assert factor(factor=4.0, attn_factor=0.8782488562869419) == pytest.approx(1.0, abs=1e-12)
    assert factor(attention_factor=1.5, attn_factor=1.0) == 1.5


def test_end_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "temperature": 0.6}))
    config, _ = registry.load(tmp_path)
    assert config.eos_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1 << 40}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id = 1099511627776 must be"):
        registry.load(tmp_path)


@pytest.mark.parametrize(("text", "said"), [(None, "does not exist"), ("{", "cannot be read"), ("[]", "JSON object")])
def test_a_folder_that_is_no_checkpoint(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        registry.load(tmp_path)
