"""DeepSeek-V2 (arXiv:2405.04434): latent attention, and experts chosen by softmax scores beside shared ones."""

from __future__ import annotations

from engine.models import latent, parts
from engine.models.config import ModelConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    mixer = latent.attention(reader, interleaved=True)
    reader.require("scoring_func", "softmax", default="softmax")
    reader.require("norm_topk_prob", False, default=False)
    grouped = reader.require("topk_method", "greedy", "group_limited_greedy", default="greedy") != "greedy"
    if not grouped:
        reader.skip("n_group", "topk_group")
    reader.assume(n_shared_experts=2)
    experts = parts.experts(
        reader,
        num_groups=reader.size("n_group") if grouped else 1,
        top_groups=reader.size("topk_group") if grouped else 1,
        renormalize=False,
        scale=reader.positive("routed_scaling_factor", 1.0),
        num_shared=reader.size("n_shared_experts", 0, least=0),
    )
    return parts.decoder(reader, "deepseek_v2", latent.layers(reader, mixer, experts), mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return latent.rules(config)
