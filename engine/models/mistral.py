"""Mistral 7B (arXiv:2310.06825): Llama with attention in a sliding window, which v0.2 and later switch off."""

from __future__ import annotations

from engine.models import parts, weight_rules
from engine.models.config import LayerConfig, ModelConfig
from engine.models.reader import LARGEST_POSITION, Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    reader.refuse("attention_bias", "projections of this family have no bias", False)
    reader.assume(num_key_value_heads=8, sliding_window=4096)
    mixer = parts.attention(reader, window=reader.size("sliding_window", None, most=LARGEST_POSITION))
    layers = (LayerConfig(mixer, parts.mlp(reader)),) * parts.num_layers(reader)
    return parts.decoder(reader, "mistral", layers, mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config)
