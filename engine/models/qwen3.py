"""Qwen3, dense (arXiv:2505.09388): Llama with an RMS norm on each query and key head."""

from __future__ import annotations

from engine.models import parts, weight_rules
from engine.models.config import LayerConfig, ModelConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    parts.full_attention_only(reader)
    reader.assume(head_dim=128, num_key_value_heads=32)
    mixer = parts.attention(reader, qk_norm=True)
    layers = (LayerConfig(mixer, parts.mlp(reader)),) * parts.num_layers(reader)
    return parts.decoder(reader, "qwen3", layers, mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config)
