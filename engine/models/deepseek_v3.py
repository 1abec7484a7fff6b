"""DeepSeek-V3 (arXiv:2412.19437) and Kimi-K2: latent attention with query latents, and experts chosen by sigmoid
scores with a correction that balances their load."""

from __future__ import annotations

from engine.models import common, latent
from engine.models.config import ModelConfig, MoeConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    text = reader.child("text_config")
    if text is None:
        return _text(reader)
    # Kimi-K2.5 wraps the text model; what it sees pictures with is not served.
    reader.skip("vision_config", "projection_hidden_size", "projection_layer_norm_eps", "ignore_index")
    reader.skip("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    reader.skip("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "tie_word_embeddings")
    reader.refuse("quantization_config", "weights are read as float32, bfloat16 or float16")
    config = _text(text)
    text.finish()
    return config


def _text(reader: Reader) -> ModelConfig:
    mixer = latent.attention(reader, interleaved=reader.read(bool, "rope_interleave", True))
    reader.require("scoring_func", "sigmoid", default="sigmoid")
    reader.require("topk_method", "noaux_tc", default="noaux_tc")
    reader.skip("num_nextn_predict_layers")
    experts = MoeConfig(
        num_experts=common.num_experts(reader, "n_routed_experts", "num_local_experts"),
        top_k=reader.read(int, "num_experts_per_tok"),
        intermediate=reader.read(int, "moe_intermediate_size"),
        score="sigmoid",
        correction_bias=True,
        num_groups=reader.read(int, "n_group"),
        top_groups=reader.read(int, "topk_group"),
        group_score="top2",
        renormalize=reader.read(bool, "norm_topk_prob", True),
        scale=reader.read(float, "routed_scaling_factor"),
        num_shared=reader.optional(int, "n_shared_experts") or 0,
        activation=common.activation(reader),
    )
    return common.decoder(reader, "deepseek_v3", latent.layers(reader, mixer, experts), mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return latent.rules(config)


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Layers behind the last one predict further tokens at once, a tower sees pictures: text does without them."""
    return (f"model.layers.{len(config.layers)}.*", "*vision_tower.*", "*mm_projector.*", "*multi_modal_projector.*")


def rename(name: str) -> str:
    """A wrapped text model stands where an unwrapped one does, in the hub's layout and in that of transformers."""
    inner = name.removeprefix("model.") if name.startswith("model.language_model.") else name
    if not inner.startswith("language_model."):
        return name
    inner = inner.removeprefix("language_model.")
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
