"""What a decoder is made of, as frozen values: the one description every family parses its config.json into.

A layer is a mixer (attention and its kin) and a feed-forward part; each carries its own numbers, so that layers of
one model may differ. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of `rotary_dim` channels of a head; `interleaved` pairs (0,1),(2,3)… instead of halves.

    kind: "default", "linear", "llama3" or "yarn", with that kind's own numbers in the fields below it.
    attention_factor multiplies cos and sin (YaRN).
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class NormConfig:
    """RMS norm; the weight is used as weight + offset (Gemma and Qwen3.5 store it around zero)."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Gated feed-forward part: down(act(gate(x)) * up(x))."""

    intermediate: int
    activation: Activation = "silu"
    bias: bool = False


MixerConfig = AttentionConfig
FeedForwardConfig = MlpConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. `sandwich` norms the output of mixer and feed-forward too, before the residual sum."""

    mixer: MixerConfig
    ffn: FeedForwardConfig
    sandwich: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: embedding, layers, final norm, head."""

    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    max_position: int
    tied: bool
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    bos_ids: tuple[int, ...] = field(default=())
    eos_ids: tuple[int, ...] = field(default=())
