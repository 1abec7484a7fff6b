"""Gemma 3, text (arXiv:2503.19786): windowed and global layers, each with a rotary base of its own; norms around
every part, stored around zero; embeddings scaled by √hidden."""

from __future__ import annotations

from dataclasses import replace

from engine.models import common
from engine.models.config import LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule

KINDS = ("sliding_attention", "full_attention")
# Published configs of 4B and more say only what differs from transformers' defaults.
DEFAULTS: dict[str, object] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "bos_token_id": 2,
}
LOCAL_THETA = 1e4


def parse(reader: Reader) -> ModelConfig:
    text = reader.child("text_config")
    if text is None:
        return _text(reader, "model")
    reader.skip("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    reader.skip("tie_word_embeddings")
    config = _text(text, "model.language_model")
    text.finish()
    return replace(config, dtype=common.dtype(reader), eos_ids=config.eos_ids or reader.ints("eos_token_id"))


def _text(reader: Reader, prefix: str) -> ModelConfig:
    reader.assume(**DEFAULTS)
    reader.refuse("use_bidirectional_attention", "tokens see only what is before them", False)
    reader.skip("_sliding_window_pattern", "cache_implementation")
    local, full = _ropes(reader)
    attention = replace(
        common.attention(reader, qk_norm=True, rotary=full),
        scale=reader.read(float, "query_pre_attn_scalar") ** -0.5,
        softcap=reader.optional(float, "attn_logit_softcapping"),
    )
    kinds = common.layer_types(reader, KINDS, "sliding_window_pattern", 6)
    window = reader.read(int, "sliding_window")
    mlp = MlpConfig(reader.read(int, "intermediate_size"), common.activation(reader, "hidden_activation"))
    mixers = {"full_attention": attention, "sliding_attention": replace(attention, rope=local, window=window)}
    layers = tuple(LayerConfig(mixers[kind], mlp, sandwich=True) for kind in kinds)
    config = common.decoder(reader, "gemma3", layers, full)
    return replace(
        config,
        norm=NormConfig(config.norm.eps, offset=1.0),
        embedding_scale=config.hidden**0.5,
        logit_softcap=reader.optional(float, "final_logit_softcapping"),
        tied=reader.read(bool, "tie_word_embeddings", True),
        prefix=prefix,
    )


def _ropes(reader: Reader) -> tuple[RopeConfig, RopeConfig]:
    """Local and global rotary embedding; before transformers 5 the local base had a key of its own."""
    head_dim = reader.read(int, "head_dim")
    full = common.rope(reader, head_dim, layer_type="full_attention")
    theta = reader.optional(float, "rope_local_base_freq")
    if theta is None and "rope_parameters" in reader:
        return common.rope(reader, head_dim, layer_type="sliding_attention"), full
    return RopeConfig(theta=theta or LOCAL_THETA, rotary_dim=head_dim), full


def rules(config: ModelConfig) -> list[Rule]:
    return common.decoder_rules(config)


def unused(config: ModelConfig) -> tuple[str, ...]:
    return ("model.vision_tower.*", "model.multi_modal_projector.*")


def rename(name: str) -> str:
    """Checkpoints of the hub put the text model elsewhere than transformers 5 does."""
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
