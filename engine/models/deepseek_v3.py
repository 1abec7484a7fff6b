"""DeepSeek-V3 (arXiv:2412.19437) and Kimi-K2: latent attention with query latents, and experts chosen by sigmoid
scores with a correction that balances their load."""

from __future__ import annotations

from engine.models import common, latent
from engine.models.config import ModelConfig, MoeConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    mixer = latent.attention(reader, interleaved=reader.read(bool, "rope_interleave", True))
    reader.require("scoring_func", "sigmoid", default="sigmoid")
    reader.require("topk_method", "noaux_tc", default="noaux_tc")
    reader.skip("num_nextn_predict_layers")
    inner = reader.read(int, "moe_intermediate_size")
    experts = MoeConfig(
        num_experts=common.num_experts(reader, "n_routed_experts", "num_local_experts"),
        top_k=reader.read(int, "num_experts_per_tok"),
        intermediate=inner,
        score="sigmoid",
        correction_bias=True,
        num_groups=reader.read(int, "n_group", 1),
        top_groups=reader.read(int, "topk_group", 1),
        group_score="top2",
        renormalize=reader.read(bool, "norm_topk_prob", True),
        scale=reader.read(float, "routed_scaling_factor", 1.0),
        shared_intermediate=inner * (reader.optional(int, "n_shared_experts") or 0),
        activation=common.activation(reader),
    )
    return common.decoder(reader, "deepseek_v3", latent.layers(reader, mixer, experts), mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return latent.rules(config)


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Layers behind the last one predict further tokens at once; decoding does without them."""
    return (f"model.layers.{len(config.layers)}.*",)
