"""The one decoder: embedding, layers, norm, head. What a layer consists of is looked up by its config's type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from engine.cache.spec import LayerSpec
from engine.cache.tensors import LayerCache
from engine.layers.attention import Attention
from engine.layers.build_context import BuildContext
from engine.layers.embedding import Embedding
from engine.layers.gated_delta import GatedDelta
from engine.layers.hyper import HyperConnection, HyperHead
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.layers.mlp import Mlp
from engine.layers.moe import Moe
from engine.layers.norm import RmsNorm
from engine.layers.shared_mla import latent_attention
from engine.layers.sparse import SparseAttention
from engine.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    MoeConfig,
    SparseAttentionConfig,
)
from engine.models.loaded import Loaded
from engine.quant.weight import Weight
from engine.runner.batch import DeviceBatch, LastTokens, select_last

# A mixer is called with a `MixerInput` and declares its `specs`. A feed-forward part is called with (x, norm,
# token_ids, residual), norms its input by `norm` unless that is None, and adds `residual` to what it gives.
MIXERS: dict[type, Callable[[Any, BuildContext], nn.Module]] = {
    AttentionConfig: Attention,
    GatedDeltaConfig: GatedDelta,
    LatentAttentionConfig: latent_attention,
    SparseAttentionConfig: SparseAttention,
}
FEED_FORWARDS: dict[type, Callable[[Any, BuildContext], nn.Module]] = {MlpConfig: Mlp, MoeConfig: Moe}


def _built(
    table: dict[type, Callable[[Any, BuildContext], nn.Module]], config: object, build: BuildContext
) -> nn.Module:
    kind = table.get(type(config))
    if kind is None:
        raise NotImplementedError(f"no layer implements {type(config).__name__}")
    return kind(config, build)


class DecoderLayer(nn.Module):
    """x + mix(norm(x)), then x + feed_forward(norm(x)); a sandwich layer norms both again before the sums."""

    def __init__(self, config: LayerConfig, build: BuildContext) -> None:
        super().__init__()
        hidden = build.config.hidden
        self.mixer_norm = RmsNorm(hidden, build)
        self.mixer = _built(MIXERS, config.mixer, build)
        self.ffn_norm = RmsNorm(hidden, build)
        self.ffn = _built(FEED_FORWARDS, config.ffn, build)
        self.mixer_out_norm = RmsNorm(hidden, build) if config.sandwich else None
        self.ffn_out_norm = RmsNorm(hidden, build) if config.sandwich else None

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """What the layer keeps between steps."""
        specs: tuple[LayerSpec, ...] = self.mixer.specs  # type: ignore[assignment]
        return specs

    def forward(
        self, x: torch.Tensor, batch: DeviceBatch, caches: tuple[LayerCache, ...], last_tokens: LastTokens | None = None
    ) -> torch.Tensor:
        """x [T, hidden] → [T, hidden], or [B, hidden] of the entries' `last_tokens`."""
        token_ids, residual = select_last(batch.token_ids, last_tokens), select_last(x, last_tokens)
        if self.mixer_out_norm is None or self.ffn_out_norm is None:
            x, normed = self.mixer(MixerInput(x, self.mixer_norm, batch, caches, residual, last_tokens, self.ffn_norm))
            given, norm = (x, self.ffn_norm) if normed is None else (normed, None)
            return self.ffn(given, norm, token_ids, residual=x)
        mixed, _ = self.mixer(MixerInput(x, self.mixer_norm, batch, caches, last_tokens=last_tokens))
        x = self.mixer_out_norm.add(mixed, residual)
        return self.ffn_out_norm.add(self.ffn(x, self.ffn_norm, token_ids, residual=None), x)


class HyperDecoderLayer(DecoderLayer):
    """A layer on parallel residual streams: each part takes a mix of them and is merged back into them."""

    def __init__(self, config: LayerConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        assert build.config.hyper is not None
        self.mixer_hyper = HyperConnection(build.config.hyper, build)
        self.ffn_hyper = HyperConnection(build.config.hyper, build)

    def forward(
        self, x: torch.Tensor, batch: DeviceBatch, caches: tuple[LayerCache, ...], last_tokens: LastTokens | None = None
    ) -> torch.Tensor:
        """x [T, N, hidden] → [T, N, hidden], or [B, N, hidden] of the entries' `last_tokens`."""
        token_ids = select_last(batch.token_ids, last_tokens)
        inner, post, comb = self.mixer_hyper(x)
        mixed, _ = self.mixer(MixerInput(inner, self.mixer_norm, batch, caches, last_tokens=last_tokens))
        x = self.mixer_hyper.merge(mixed, *(select_last(part, last_tokens) for part in (x, post, comb)))
        inner, post, comb = self.ffn_hyper(x)
        return self.ffn_hyper.merge(self.ffn(inner, self.ffn_norm, token_ids, residual=None), x, post, comb)


def layer_kind(build: BuildContext) -> type[DecoderLayer]:
    """What layers of a model that is built so stand on: one residual stream or several."""
    return DecoderLayer if build.config.hyper is None else HyperDecoderLayer


class Decoder(Loaded):
    """Built without memory; `materialize` gives it some, then the loader fills it."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        config = build.config
        self.config = config
        self.embed = Embedding(build)
        kind = layer_kind(build)
        self.layers = nn.ModuleList(kind(layer, build.at(i)) for i, layer in enumerate(config.layers))
        self.hyper_head = None if config.hyper is None else HyperHead(config.hyper, build)
        self.norm = RmsNorm(config.hidden, build)
        self.vocabulary = build.vocabulary
        self._communicator = build.communicator
        self.head = Linear(config.hidden, self.vocabulary.count, build)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding again, when the model says so."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def materialize(self, device: torch.device) -> None:
        super().materialize(device)
        self.tie()

    @property
    def specs(self) -> list[tuple[LayerSpec, ...]]:
        """What each layer keeps between steps."""
        return [layer.specs for layer in self.layers]  # type: ignore[misc]

    @property
    def ranks(self) -> int:
        """How many share the model."""
        return self._communicator.size

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, Moe) for layer in self.layers)

    @property
    def active(self) -> float:
        """The part of its weights that a token is multiplied by: less than 1 with experts."""
        total = sum(w.count for layer in self.layers for w in layer.modules() if isinstance(w, Weight))
        experts = [layer.ffn for layer in self.layers if isinstance(layer.ffn, Moe)]
        return 1 - sum(moe.idle * (moe.gate_up.count + moe.down.count) for moe in experts) / total

    @property
    def weight_bits(self) -> float:
        """Bits of one of the layers' weights, on average, with its share of scales."""
        weights = [w for layer in self.layers for w in layer.modules() if isinstance(w, Weight)]
        return 8 * sum(w.value.nbytes for w in weights) / sum(w.count for w in weights)

    @property
    def widest_product(self) -> int:
        """Gated outputs of the largest product that all tokens take; 0 with experts. The widest of all ranks, which
        are asked: steps are padded to the same shapes everywhere."""
        dense = [layer.ffn for layer in self.layers if isinstance(layer.ffn, Mlp)]
        own = max(ffn.down.weight.shape[1] for ffn in dense) if len(dense) == len(self.layers) else 0
        return max(told for (told,) in self._communicator.all_gather_numbers([own]))

    @property
    def warmup_layers(self) -> list[int]:
        """The first layer of each kind and, as the end of a step, the last: together they run all code of the model."""
        layers = self.config.layers
        return [*(i for i, layer in enumerate(layers) if layer not in layers[:i]), len(layers) - 1]

    def forward(
        self,
        batch: DeviceBatch,
        caches: tuple[tuple[LayerCache, ...], ...],
        only: Sequence[int] | None = None,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        """Residual stream after the last layer, not yet normed: [T, hidden], or [B, hidden] of the entries'
        `last_tokens`. caches[i] are layer i's.

        only: the layers to run, for a warm-up; all when None.
        """
        return self.tapped(batch, caches, (), only, last_tokens)[0]

    def tapped(
        self,
        batch: DeviceBatch,
        caches: tuple[tuple[LayerCache, ...], ...],
        taps: Sequence[int],
        only: Sequence[int] | None = None,
        last_tokens: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and the residual stream in front of the layers `taps` side by side, [T, taps · hidden], or all
        of its parallel ones, [T, taps · N · hidden]. The number of layers as a tap stands for the stream behind the
        last, which is whole without `last_tokens` alone."""
        x = self.embed(batch.token_ids)
        if self.config.hyper is not None:
            x = x[:, None].expand(-1, self.config.hyper.streams, -1)
        # Copies, since a sum may stand in its residual's place.
        seen = x.new_zeros(len(x), len(taps), *x.shape[1:]) if taps else x[:, :0]
        ran = range(len(self.layers)) if only is None else only
        for place, i in enumerate(ran):
            _copy_taps(seen, taps, i, x)
            x = self.layers[i](x, batch, caches[i], last_tokens if place == len(ran) - 1 else None)
        _copy_taps(seen, taps, len(self.layers), x)
        return (x if self.hyper_head is None else self.hyper_head(x)), seen.flatten(1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the residual stream [N, hidden] → logits of this rank's tokens [N, vocabulary.count]."""
        y = self.head(x, norm=self.norm)
        cap = self.config.logit_softcap
        return y if cap is None else cap * torch.tanh(y / cap)

    def whole_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Of the tokens of all ranks, [N, vocab_size]."""
        return self.vocabulary.whole(self.logits(x))


def _copy_taps(seen: torch.Tensor, taps: Sequence[int], layer: int, x: torch.Tensor) -> None:
    for place, tap in enumerate(taps):
        if tap == layer:
            seen[:, place] = x
