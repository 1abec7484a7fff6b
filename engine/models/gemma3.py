"""Gemma 3, text (arXiv:2503.19786): windowed and global layers, each with a rotary base of its own; norms around
every part, stored around zero; embeddings scaled by √hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models import parts, rope, weight_rules
from engine.models.config import LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig
from engine.models.reader import LARGEST_POSITION, Reader
from engine.weights.rules import Rule

KINDS = ("sliding_attention", "full_attention")

# Published configs of 4B and more leave out what the config class of transformers says anyway.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def parse(reader: Reader) -> ModelConfig:
    text = parts.text(reader)
    if text is None:
        return _text(reader, "model")
    reader.skip("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    reader.skip("image_token_id", "boi_token_id", "eoi_token_id")
    text.refuse("final_logit_softcapping", "transformers leaves logits as they are where a vision tower stands beside")
    config = _text(text, "model.language_model")
    text.finish()
    return replace(config, tied=reader.read(bool, "tie_word_embeddings", config.tied))


def _text(reader: Reader, prefix: str) -> ModelConfig:
    reader.assume(**DEFAULTS)
    reader.refuse("use_bidirectional_attention", "tokens see only what is before them", False)
    reader.refuse("attn_logit_softcapping", "transformers reads it for this family and leaves scores as they are")
    local, full = _ropes(reader)
    attention = replace(
        parts.attention(reader, qk_norm=True, rotary=full), scale=reader.positive("query_pre_attn_scalar") ** -0.5
    )
    kinds = parts.layer_types(reader, KINDS, reader.size("sliding_window_pattern", 6))
    window = reader.size("sliding_window", most=LARGEST_POSITION)
    mlp = MlpConfig(reader.size("intermediate_size"), parts.activation(reader, "hidden_activation"))
    mixers = {"full_attention": attention, "sliding_attention": replace(attention, rope=local, window=window)}
    layers = tuple(LayerConfig(mixers[kind], mlp, sandwich=True) for kind in kinds)
    config = parts.decoder(reader, "gemma3", layers, full)
    return replace(
        config,
        norm=NormConfig(config.norm.eps, offset=1.0),
        embedding_scale=config.hidden**0.5,
        logit_softcap=reader.positive("final_logit_softcapping", None),
        prefix=prefix,
    )


def _ropes(reader: Reader) -> tuple[RopeConfig, RopeConfig]:
    """Local and global rotary embedding; before transformers 5 the local base had a key of its own, and a scaling was
    that of the global one."""
    head_dim, length = reader.size("head_dim"), rope.max_position(reader)
    bases = (reader.positive("rope_local_base_freq"), reader.positive("rope_theta"))
    parameters = reader.child("rope_parameters") or Reader({})
    scaling: dict[str, Any] = reader.optional(dict, "rope_scaling") or {}
    made = []
    for kind, theta in zip(KINDS, bases, strict=True):
        values = {"rope_theta": theta, **(parameters.optional(dict, kind) or {})}
        if kind == "full_attention":
            values.update(scaling)
        nested = Reader(values, f"{reader.where}: rope of {kind}")
        # transformers overlooks both where each layer type has parameters of its own.
        nested.require("truncate", True, default=True)
        nested.refuse("type", "name the kind as rope_type")
        made.append(rope.scaled(nested, head_dim, length))
    parameters.finish()
    return made[0], made[1]


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config)


def unused(config: ModelConfig) -> tuple[str, ...]:
    return ("model.vision_tower.*", "model.multi_modal_projector.*")


def rename(name: str) -> str:
    """Checkpoints of the hub put the text model elsewhere than transformers 5 does."""
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
