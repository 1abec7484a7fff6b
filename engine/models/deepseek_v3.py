"""DeepSeek-V3 (arXiv:2412.19437) and Kimi-K2: latent attention with query latents, and experts chosen by sigmoid
scores with a correction that balances their load."""

from __future__ import annotations

from dataclasses import replace

from engine.models import latent, mtp, parts, weight_rules
from engine.models.config import LatentAttentionConfig, ModelConfig, MoeConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    text = parts.text(reader)
    if text is None:
        return _text(reader)
    # Kimi-K2.5 wraps the text model; what it sees pictures with is not served.
    reader.skip("vision_config", "projection_hidden_size", "projection_layer_norm_eps", "ignore_index")
    reader.skip("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    reader.skip("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder")
    text.require("model_type", "kimi_k2", "deepseek_v3", default="deepseek_v3")
    config = _text(text)
    text.finish()
    return replace(config, tied=reader.read(bool, "tie_word_embeddings", config.tied))


def _text(reader: Reader) -> ModelConfig:
    mixer = latent.attention(reader, interleaved=reader.read(bool, "rope_interleave", True))
    reader.require("scoring_func", "sigmoid", default="sigmoid")
    reader.require("topk_method", "noaux_tc", default="noaux_tc")
    reader.assume(n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=1)
    experts = parts.experts(
        reader,
        score="sigmoid",
        correction_bias=True,
        num_groups=reader.size("n_group"),
        top_groups=reader.size("topk_group"),
        group_score="top2",
        renormalize=reader.read(bool, "norm_topk_prob", True),
        scale=reader.positive("routed_scaling_factor"),
        num_shared=reader.size("n_shared_experts", 0, least=0),
    )
    config = parts.decoder(reader, "deepseek_v3", latent.layers(reader, mixer, experts), mixer.rope)
    return replace(config, num_mtp_modules=reader.size("num_nextn_predict_layers", 0, least=0))


def rules(config: ModelConfig) -> list[Rule]:
    return latent.rules(config)


def mtp_config(config: ModelConfig) -> mtp.MtpConfig | None:
    """The layer behind the last, as published: it has an embedding and a head of its own, which equal the model's."""
    layer, name = config.layers[-1], f"model.layers.{len(config.layers)}"
    if not config.num_mtp_modules or not isinstance(layer.ffn, MoeConfig):
        return None
    assert isinstance(layer.mixer, LatentAttentionConfig)
    own = [
        *weight_rules.norm_rules(name=name),
        *latent.attention_rules(layer.mixer, f"{name}.self_attn"),
        *weight_rules.moe_rules(layer.ffn, f"{name}.mlp"),
    ]
    other = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
    named = {ours: f"{name}.{theirs}" for ours, theirs in other.items()}
    outer = {
        "model.embed_tokens.weight": f"{name}.embed_tokens.weight",
        "lm_head.weight": f"{name}.shared_head.head.weight",
    }
    return mtp.MtpConfig(layer, f"{name}.", False, mtp.rules(own, **named), outer)


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Layers behind the last one predict further tokens at once, a tower sees pictures: text does without them."""
    modules = tuple(f"model.layers.{len(config.layers) + i}.*" for i in range(config.num_mtp_modules))
    return (*modules, "*vision_tower.*", "*mm_projector.*", "*multi_modal_projector.*")


def rename(name: str) -> str:
    """A wrapped text model stands where an unwrapped one does, in the hub's layout and in that of transformers."""
    inner = name.removeprefix("model.") if name.startswith("model.language_model.") else name
    if not inner.startswith("language_model."):
        return name
    inner = inner.removeprefix("language_model.")
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
