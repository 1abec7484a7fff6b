"""Qwen3, dense (arXiv:2505.09388): Llama with an RMS norm on each query and key head."""

from __future__ import annotations

from engine.models import common
from engine.models.config import LayerConfig, ModelConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    common.full_attention_only(reader)
    reader.assume(head_dim=128, num_key_value_heads=32)
    mixer = common.attention(reader, qk_norm=True)
    layers = (LayerConfig(mixer, common.mlp(reader)),) * common.num_layers(reader)
    return common.decoder(reader, "qwen3", layers, mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return common.decoder_rules(config)
