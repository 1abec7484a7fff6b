"""What a decoder is made of, as frozen values: the one description every family parses its config.json into.

A layer is a mixer (attention and its kin) and a feed-forward part; each carries its own numbers, so that layers of
one model may differ. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# "swiglu_oai" is (g · σ(1.702 g)) ∘ (u + 1), of experts alone.
Activation = Literal["silu", "gelu_tanh", "swiglu_oai"]


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
    """Grouped-query attention. `gated` multiplies its output by the sigmoid of a gate projected beside each query;
    `sinks` adds a learned logit a head to the softmax, which has no value."""

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
    gated: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Multi-head latent attention: keys and values of all heads come from one latent of `kv_rank` values a token.

    A head's query and key hold `nope_dim` plain channels, then `rope_dim` rotated ones; the rotated key is shared by
    the heads. `q_rank` None projects queries directly. `latent_eps` is the eps of the norms of both latents.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeConfig
    bias: bool = False
    latent_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Linear attention by the gated delta rule behind a causal convolution of `conv_width` taps.

    Each key head serves num_value_heads / num_key_heads value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Chooses the `top_k` compressed entries that a query reads, by scores of `num_heads` small heads."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class SparseAttentionConfig:
    """One shared key-value vector a token, read in a window, and one compressed entry for every `ratio` tokens.

    ratio 0 keeps the window alone. `overlap` lets an entry see the window before its own too; `indexer` None reads
    every entry. Rotary covers the last channels of a head. The output goes through `out_groups` blocks of `out_rank`.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    scale: float
    rope: RopeConfig
    window: int
    out_groups: int
    out_rank: int
    ratio: int = 0
    overlap: bool = False
    indexer: IndexerConfig | None = None


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Gated feed-forward part: down(act(gate(x)) * up(x)). `limit` clips gate above and up on both sides first."""

    intermediate: int
    activation: Activation = "silu"
    bias: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts, each a gated feed-forward part of `intermediate`, and `num_shared` that take every token.

    A token's scores choose its `top_k` experts; `correction_bias` is added for the choice only. With num_groups > 1
    experts are chosen within the `top_groups` groups whose "max" or "top2" sum of scores is the largest. `hashed`
    takes the choice from a table by token id. Weights are the chosen scores, to sum 1 if `renormalize`, times `scale`.
    apart: shared experts have no place in the routed ones' tables, since they are stored in another way.
    held: the run of experts whose matrices are here, None: all. shared_inner: inner channels here of all shared
    experts together, where they are apart; None: all. bias: experts add biases to both of their products, router_bias:
    the router to its logits.
    """

    num_experts: int
    top_k: int
    intermediate: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalize: bool = True
    scale: float = 1.0
    hashed: bool = False
    num_shared: int = 0
    activation: Activation = "silu"
    limit: float | None = None
    apart: bool = False
    bias: bool = False
    router_bias: bool = False
    held: tuple[int, int] | None = None
    shared_inner: int | None = None

    @property
    def experts(self) -> range:
        """The numbers of those whose matrices are here."""
        return range(*(self.held or (0, self.num_experts)))

    @property
    def num_behind(self) -> int:
        """Shared experts that stand behind the others in their tables."""
        return 0 if self.apart else self.num_shared


@dataclass(frozen=True, slots=True)
class HyperConfig:
    """Hyper-connections: the residual is `streams` parallel ones, mixed by doubly stochastic matrices.

    `iterations` of Sinkhorn-Knopp make them so, with `eps` in every division.
    """

    streams: int
    iterations: int
    eps: float


MixerConfig = AttentionConfig | LatentAttentionConfig | GatedDeltaConfig | SparseAttentionConfig
FeedForwardConfig = MlpConfig | MoeConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. `sandwich` norms the output of mixer and feed-forward too, before the residual sum."""

    mixer: MixerConfig
    ffn: FeedForwardConfig
    sandwich: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: embedding, layers, final norm, head. `prefix` is where the checkpoint keeps all but the head, and
    `num_mtp_modules` the layers behind the last that it may hold, which predict further tokens (`engine.models.mtp`).
    `dtype` None is that of the checkpoint's tensors."""

    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    max_position: int
    tied: bool
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    hyper: HyperConfig | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: str = "model"
    num_mtp_modules: int = 0

    @property
    def block_multiple(self) -> int:
        """Tokens that a block of the cache must hold, or a multiple of them: compressed entries never cross blocks."""
        ratios = [layer.mixer.ratio for layer in self.layers if isinstance(layer.mixer, SparseAttentionConfig)]
        return math.lcm(*(ratio for ratio in ratios if ratio))
