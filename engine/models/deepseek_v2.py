"""DeepSeek-V2 (arXiv:2405.04434): latent attention, and experts chosen by softmax scores beside shared ones."""

from __future__ import annotations

from engine.models import common, latent
from engine.models.config import ModelConfig, MoeConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    mixer = latent.attention(reader, interleaved=True)
    reader.require("scoring_func", "softmax", default="softmax")
    reader.require("norm_topk_prob", False, default=False)
    grouped = reader.require("topk_method", "greedy", "group_limited_greedy", default="greedy") != "greedy"
    groups, top_groups = reader.read(int, "n_group", 1), reader.read(int, "topk_group", 1)
    experts = MoeConfig(
        num_experts=common.num_experts(reader, "n_routed_experts", "num_local_experts"),
        top_k=reader.read(int, "num_experts_per_tok"),
        intermediate=reader.read(int, "moe_intermediate_size"),
        num_groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        renormalize=False,
        scale=reader.read(float, "routed_scaling_factor", 1.0),
        num_shared=reader.optional(int, "n_shared_experts") or 0,
        activation=common.activation(reader),
    )
    return common.decoder(reader, "deepseek_v2", latent.layers(reader, mixer, experts), mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return latent.rules(config)
