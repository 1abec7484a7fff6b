"""Qwen3 with routed experts (arXiv:2505.09388): a softmax over experts, the best ones weighted to sum 1."""

from __future__ import annotations

from engine.models import common
from engine.models.config import LayerConfig, ModelConfig, MoeConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    common.full_attention_only(reader)
    reader.skip("router_aux_loss_coef", "output_router_logits")
    mixer = common.attention(reader, qk_norm=True)
    experts = MoeConfig(
        num_experts=common.num_experts(reader, "num_experts", "num_local_experts"),
        top_k=reader.read(int, "num_experts_per_tok"),
        intermediate=reader.read(int, "moe_intermediate_size"),
        renormalize=reader.read(bool, "norm_topk_prob", False),
        activation=common.activation(reader),
    )
    dense, every = set(reader.read(list, "mlp_only_layers", [])), reader.read(int, "decoder_sparse_step", 1)
    mlp = common.mlp(reader)
    layers = tuple(
        LayerConfig(mixer, mlp if i in dense or (i + 1) % every else experts) for i in range(common.num_layers(reader))
    )
    return common.decoder(reader, "qwen3_moe", layers, mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return common.decoder_rules(config)
