"""Qwen3 with routed experts (arXiv:2505.09388): a softmax over experts, the best ones weighted to sum 1."""

from __future__ import annotations

from engine.models import parts, weight_rules
from engine.models.config import LayerConfig, ModelConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    parts.full_attention_only(reader)
    reader.skip("router_aux_loss_coef", "output_router_logits")
    # Qwen3-Coder says these; other values are those of other families.
    reader.require("use_qk_norm", True, default=True)
    reader.require("qkv_bias", False, default=False)
    reader.require("shared_expert_intermediate_size", 0, default=0)
    reader.assume(num_key_value_heads=4)
    mixer = parts.attention(reader, qk_norm=True)
    experts = parts.experts(reader, renormalize=reader.read(bool, "norm_topk_prob", False))
    dense, every = reader.items(int, "mlp_only_layers") or [], reader.size("decoder_sparse_step", 1)
    count, mlp = parts.num_layers(reader), parts.mlp(reader)
    reader.check(all(0 <= i < count for i in dense), f"mlp_only_layers = {dense} must be among the {count} layers")
    layers = tuple(LayerConfig(mixer, mlp if i in dense or (i + 1) % every else experts) for i in range(count))
    return parts.decoder(reader, "qwen3_moe", layers, mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config)
