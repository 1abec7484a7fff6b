"""Heads that draft from a large model's hidden states, as modules."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from engine.cache.spec import LayerSpec
from engine.cache.tensors import LayerCache
from engine.layers.attention import Attention
from engine.layers.build_context import BuildContext
from engine.layers.embedding import Embedding
from engine.layers.hyper import HyperHead
from engine.layers.linear import Linear
from engine.layers.mixer import MixerInput
from engine.layers.mlp import Mlp
from engine.layers.norm import RmsNorm
from engine.models.config import AttentionConfig, MlpConfig
from engine.models.decoder import Decoder, DecoderLayer, layer_kind
from engine.models.eagle3 import Eagle3Config
from engine.models.loaded import Loaded
from engine.models.mtp import MtpConfig
from engine.parallel.vocabulary import Vocabulary
from engine.runner.batch import DeviceBatch, LastTokens, select_last
from engine.weights.checkpoint import WeightsError

Caches = tuple[tuple[LayerCache, ...], ...]


class DraftHead(Loaded):
    """Says token i + 2 by token i + 1 and what a large model holds at token i, or by what it made itself of token i.

    layers keep an entry for each such i, in the place of token i. embed None takes the large model's embedding. width:
    of what it makes. vocabulary: which tokens its logits are of.
    """

    layers: nn.ModuleList
    embed: Embedding | None
    taps: tuple[int, ...]
    width: int
    dtype: torch.dtype
    vocabulary: Vocabulary

    @property
    def specs(self) -> list[tuple[LayerSpec, ...]]:
        """What each layer keeps between steps."""
        return [layer.specs for layer in self.layers]  # type: ignore[misc]

    @abstractmethod
    def combine(self, seen: torch.Tensor) -> torch.Tensor:
        """What `Decoder.tapped` saw at `taps`, [T, taps · hidden] → what `forward` takes as hidden [T, width]."""

    @abstractmethod
    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: DeviceBatch,
        caches: Caches,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        """embedded [T, width] of the tokens behind those of the batch, hidden at those [T, width] → [T, width] for the
        next step and for `logits`, or [B, width] of the entries' `last_tokens`."""

    @abstractmethod
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, width] → [N, vocabulary.count], −∞ for tokens that have no draft."""


class Eagle3Layer(nn.Module):
    """A layer whose attention takes the normed embedding and the normed hidden state side by side."""

    def __init__(self, config: Eagle3Config, build: BuildContext) -> None:
        super().__init__()
        hidden, layer = build.config.hidden, config.model.layers[0]
        assert isinstance(layer.mixer, AttentionConfig)
        assert isinstance(layer.ffn, MlpConfig)
        self._normed = config.normed
        self.embed_norm = RmsNorm(hidden, build)
        self.hidden_norm = RmsNorm(hidden, build)
        self.mixer = Attention(layer.mixer, build, inputs=2 * hidden)
        self.ffn_norm = RmsNorm(hidden, build)
        self.ffn = Mlp(layer.ffn, build)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.mixer.specs

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: DeviceBatch,
        caches: tuple[LayerCache, ...],
        last_tokens: LastTokens | None,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.embed_norm(embedded), normed), dim=1)
        # A sum may stand in its residual's place, and the hidden state is somebody else's.
        residual = select_last(normed if self._normed else hidden.clone(), last_tokens)
        x, taken = self.mixer(MixerInput(x, None, batch, caches, residual, last_tokens, self.ffn_norm))
        given, norm = (x, self.ffn_norm) if taken is None else (taken, None)
        return self.ffn(given, norm, select_last(batch.token_ids, last_tokens), residual=x)


class Eagle3Head(DraftHead):
    """See `engine.models.eagle3`. d2t [num_drafts] int64: what to add to a draft's number for its token."""

    def __init__(self, config: Eagle3Config, build: BuildContext, own_embedding: bool, own_table: bool) -> None:
        super().__init__()
        hidden, seen = config.model.hidden, len(config.taps) * config.tapped
        self.config = config
        self.taps, self.width, self.dtype = config.taps, hidden, build.dtype
        self.vocabulary = build.vocabulary
        self.embed = Embedding(build) if own_embedding else None
        self.fc_norm = RmsNorm(seen, build) if config.fc_norm else None
        self.fc = Linear(seen, hidden, build)
        first = Eagle3Layer(config, build.at(0))
        rest = (DecoderLayer(layer, build.at(1 + i)) for i, layer in enumerate(config.model.layers[1:]))
        self.layers = nn.ModuleList((first, *rest))
        self.norm = RmsNorm(hidden, build)
        self.head = Linear(hidden, config.num_drafts, build)
        self.d2t = build.empty(config.num_drafts, dtype=torch.int64) if own_table else None
        self._tokens: torch.Tensor | None = None

    def combine(self, seen: torch.Tensor) -> torch.Tensor:
        return self.fc(seen, norm=self.fc_norm)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: DeviceBatch,
        caches: Caches,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        last = len(self.layers) - 1
        x = self.layers[0](embedded, hidden, batch, caches[0], None if last else last_tokens)
        for i in range(1, last + 1):
            x = self.layers[i](x, batch, caches[i], last_tokens if i == last else None)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        drafts = self.head(x, norm=self.norm)
        if self.d2t is None:
            return drafts
        whole = drafts.new_full((len(x), self.config.model.vocab_size), float("-inf"))
        return whole.index_copy_(1, self._named() if self._tokens is None else self._tokens, drafts)

    def spread(self) -> None:
        """Fill the table as if drafts lay evenly among all tokens."""
        if self.d2t is not None:
            own = torch.arange(self.config.num_drafts, device=self.d2t.device)
            self.d2t.copy_(own * self.config.model.vocab_size // self.config.num_drafts - own)

    def number(self) -> None:
        """Take over the filled table. Raises WeightsError where it names tokens that are not there, or one twice."""
        if self.d2t is None:
            return
        tokens, most = self._named(), self.config.model.vocab_size
        if not bool(((tokens >= 0) & (tokens < most)).all()) or len(tokens.unique()) < len(tokens):
            raise WeightsError(
                f"d2t of speculation.model names tokens beyond the {most} of the model, or one of them twice: take a "
                "head that was trained for this model"
            )
        self._tokens = tokens

    def _named(self) -> torch.Tensor:
        assert self.d2t is not None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class MtpHeadBase(DraftHead):
    """See `engine.models.mtp`. What is not its own it takes from the model that it belongs to."""

    def __init__(
        self, config: MtpConfig, build: BuildContext, target: Decoder, own_embedding: bool, own_head: bool
    ) -> None:
        super().__init__()
        hidden = build.config.hidden
        self.taps, self.dtype = (len(target.layers),), build.dtype
        self.embed = Embedding(build) if own_embedding else None
        self.embed_norm = RmsNorm(hidden, build)
        self.hidden_norm = RmsNorm(hidden, build)
        self.layers = nn.ModuleList([layer_kind(build)(build.config.layers[0], build.at(0))])
        self.norm = RmsNorm(hidden, build)
        self.vocabulary = build.vocabulary
        self.head = Linear(hidden, self.vocabulary.count, build) if own_head else None
        self._normed = config.normed
        self._target = (target,)  # no part of this module

    def _say(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer [N, hidden], or that normed → [N, vocabulary.count]."""
        head = self._target[0].head if self.head is None else self.head
        return head(x, norm=None if self._normed else self.norm)


class MtpHead(MtpHeadBase):
    """Of a model with one residual stream."""

    def __init__(
        self, config: MtpConfig, build: BuildContext, target: Decoder, own_embedding: bool, own_head: bool
    ) -> None:
        super().__init__(config, build, target, own_embedding, own_head)
        self.width = build.config.hidden
        self.project = Linear(2 * self.width, self.width, build)

    def combine(self, seen: torch.Tensor) -> torch.Tensor:
        return self._target[0].norm(seen)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: DeviceBatch,
        caches: Caches,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        x = self.project(torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=1))
        x = self.layers[0](x, batch, caches[0], last_tokens)
        return self.norm(x) if self._normed else x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._say(x)


class HyperMtpHead(MtpHeadBase):
    """Of a model with several: its layer has as many, each of which begins with one of the model's and the embedding,
    and a head of its own makes one of them. hidden is all of them side by side."""

    def __init__(
        self, config: MtpConfig, build: BuildContext, target: Decoder, own_embedding: bool, own_head: bool
    ) -> None:
        super().__init__(config, build, target, own_embedding, own_head)
        hyper, hidden = build.config.hyper, build.config.hidden
        assert hyper is not None
        self.width = hyper.streams * hidden
        self.embed_project = Linear(hidden, hidden, build)
        self.hidden_project = Linear(hidden, hidden, build)
        self.hyper_head = HyperHead(hyper, build)
        self._streams = (hyper.streams, hidden)

    def combine(self, seen: torch.Tensor) -> torch.Tensor:
        return seen

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: DeviceBatch,
        caches: Caches,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        streams = hidden.reshape(-1, self._streams[1])
        x = self.hidden_project(streams, norm=self.hidden_norm).unflatten(0, (-1, self._streams[0]))
        x = x + self.embed_project(embedded, norm=self.embed_norm)[:, None]
        return self.layers[0](x, batch, caches[0], last_tokens).flatten(1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._say(self.hyper_head(x.unflatten(1, self._streams)))


def mtp_head(build: BuildContext) -> type[MtpHeadBase]:
    """The head for a model that was built so."""
    return MtpHead if build.config.hyper is None else HyperMtpHead
