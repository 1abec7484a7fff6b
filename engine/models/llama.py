"""Llama 2 and 3 (arXiv:2407.21783): grouped-query attention, gated feed-forward, RMS norm before each."""

from __future__ import annotations

from engine.models import parts, weight_rules
from engine.models.config import LayerConfig, MlpConfig, ModelConfig
from engine.models.reader import Reader
from engine.weights.rules import Rule


def parse(reader: Reader) -> ModelConfig:
    parts.full_attention_only(reader)
    # What nanotron and Falcon 3 say besides of what every model of this family has.
    reader.require("rope_interleaved", False, default=False)
    reader.require("activation", "swiglu", default="swiglu")
    mixer = parts.attention(reader)
    mlp = MlpConfig(reader.size("intermediate_size"), parts.activation(reader), reader.read(bool, "mlp_bias", False))
    layers = (LayerConfig(mixer, mlp),) * parts.num_layers(reader)
    return parts.decoder(reader, "llama", layers, mixer.rope)


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config)
