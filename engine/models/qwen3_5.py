"""Qwen3.5, text: three layers of linear attention by the gated delta rule to one of attention with an output gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.models import mtp, parts, weight_rules
from engine.models.config import AttentionConfig, GatedDeltaConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule, Sections, Shape, Split, concat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

KINDS = ("linear_attention", "full_attention")


def parse(reader: Reader) -> ModelConfig:
    text = parts.text(reader)
    if text is None:
        return _text(reader, "model")
    reader.skip("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tied = reader.read(bool, "tie_word_embeddings", False)
    config = replace(_text(text, "model.language_model"), tied=tied)
    text.finish()
    return config


def _text(reader: Reader, prefix: str) -> ModelConfig:
    reader.require("attn_output_gate", True, default=True)
    reader.require("mamba_ssm_dtype", "float32", default="float32")
    reader.require("hidden_act", "silu")
    reader.skip("mtp_use_dedicated_embeddings")  # tensors say so
    reader.require("mlp_only_layers", [], default=[])
    reader.assume(head_dim=256, num_key_value_heads=4, partial_rotary_factor=0.25)
    attention = replace(parts.attention(reader, qk_norm=True, partial=True), gated=True)
    keys, values = reader.size("linear_num_key_heads"), reader.size("linear_num_value_heads")
    reader.check(
        values % keys == 0, f"linear_num_value_heads = {values} must be a multiple of linear_num_key_heads = {keys}"
    )
    linear = GatedDeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=reader.size("linear_key_head_dim"),
        value_dim=reader.size("linear_value_head_dim"),
        conv_width=reader.size("linear_conv_kernel_dim"),
    )
    kinds = parts.layer_types(reader, KINDS, reader.size("full_attention_interval", 4))
    mlp = parts.mlp(reader)
    layers = tuple(LayerConfig(attention if kind == "full_attention" else linear, mlp) for kind in kinds)
    config = parts.decoder(reader, "qwen3_5", layers, attention.rope)
    num_mtp_modules = reader.size("mtp_num_hidden_layers", 0, least=0)
    return replace(config, norm=NormConfig(config.norm.eps, offset=1.0), prefix=prefix, num_mtp_modules=num_mtp_modules)


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config, _mixer_rules, "")


def _mixer_rules(config: AttentionConfig | GatedDeltaConfig, name: str) -> list[Rule]:
    at = "layers.{layer}.mixer"
    if isinstance(config, AttentionConfig):
        name = f"{name}self_attn"

        def query_and_gate(target: Tensor, shapes: Sequence[Shape]) -> Sequence[Tensor | list[Tensor]]:
            """A head's query rows and gate rows alternate in q_proj; the gates of all heads stand behind k and v."""
            d, heads, groups = config.head_dim, config.num_heads, config.num_kv_heads
            q, k, v, gate = target.split((heads * d, groups * d, groups * d, heads * d))
            pairs = zip(q.split(d), gate.split(d), strict=True)
            return [[rows for pair in pairs for rows in pair], k, v]

        rules = weight_rules.attention_rules(config, name)
        return [replace(rule, combine=query_and_gate) if ".qkv." in rule.target else rule for rule in rules]
    name = f"{name}linear_attn"
    projections = tuple(f"{name}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    values = config.num_value_heads * config.value_dim
    channels = 2 * config.num_key_heads * config.key_dim + values
    pieces = concat(channels, values, config.num_value_heads, config.num_value_heads)
    each, keys = Split("outputs", "heads"), Split("outputs", "groups", config.key_dim)
    gates = Split("outputs", "heads", config.value_dim)
    qkv = Sections((keys, keys, gates))
    return [
        Rule(f"{at}.project.weight", projections, pieces, splits=(qkv, gates, each, each)),
        Rule(f"{at}.conv", (f"{name}.conv1d.weight",), splits=(qkv,)),
        Rule(f"{at}.a_log", (f"{name}.A_log",), splits=(each,)),
        Rule(f"{at}.dt_bias", (f"{name}.dt_bias",), splits=(each,)),
        Rule(f"{at}.norm", (f"{name}.norm.weight",)),
        Rule(f"{at}.out.weight", (f"{name}.out_proj.weight",), splits=(Split("inputs", "heads", config.value_dim),)),
    ]


def mtp_config(config: ModelConfig) -> mtp.MtpConfig | None:
    """A layer of attention under names of its own; what it gives is normed for the next as for the head."""
    layer = next((layer for layer in config.layers if isinstance(layer.mixer, AttentionConfig)), None)
    if not config.num_mtp_modules or layer is None:
        return None
    assert isinstance(layer.mixer, AttentionConfig)
    assert isinstance(layer.ffn, MlpConfig)
    name = "mtp.layers.0"
    own = [
        *weight_rules.norm_rules(name=name),
        *_mixer_rules(layer.mixer, f"{name}."),
        *weight_rules.mlp_rules(layer.ffn, f"{name}.mlp"),
    ]
    norms = {"embed_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"}
    outer = {f"{config.prefix}.embed_tokens.weight": "mtp.embed_tokens.weight", "lm_head.weight": "mtp.lm_head.weight"}
    return mtp.MtpConfig(layer, "mtp.", True, mtp.rules(own, project="mtp.fc", **norms), outer)


def rename(name: str) -> str:
    """Releases differ in where they put the module that predicts further tokens."""
    return name.removeprefix("model.") if name.startswith("model.mtp.") else name


def unused(config: ModelConfig) -> tuple[str, ...]:
    """The vision tower, and the layers that predict further tokens at once."""
    return ("model.visual.*", "mtp.*")
