"""What a layer is built with, as one value: the ops that were chosen, the model's sizes and the shared rope tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from engine.layers.rope import rope_table
from engine.models.config import ModelConfig, RopeConfig
from engine.parallel.communicator import ALONE, Communicator
from engine.parallel.vocabulary import Vocabulary
from engine.quant.weight import Kinds, Weight
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.select import Ops


@dataclass(frozen=True)
class BuildContext:
    """ops run every layer. Parameters have `dtype`; tables cover positions 0 … max_model_len − 1 on `device`.

    router_dtype is that of the routers of experts; None: float32. deterministic asks every op for batch-invariant
    arithmetic. fused_attention lets attention rotate and write the keys of decode entries itself.
    cache_scales are those of each layer where caches hold 8-bit floats, else none; layer is the one that is built.
    communicator adds up what ranks make of their parts of a product; sliced_context: ranks share out the tokens of
    latent caches; merge_candidates: they draw from candidates instead of all logits.
    drafts is how many tokens of an entry may be taken back after a step.
    """

    ops: Ops
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    deterministic: bool = False
    fused_attention: bool = True
    router_dtype: torch.dtype | None = None
    cache_scales: tuple[CacheScales, ...] = ()
    layer: int = 0
    communicator: Communicator = ALONE
    drafts: int = 0
    sliced_context: bool = False
    merge_candidates: bool = True
    _tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = field(default_factory=dict)

    @property
    def vocabulary(self) -> Vocabulary:
        """The rows of embedding and head that are here."""
        return Vocabulary(self.config.vocab_size, self.communicator, self.merge_candidates)

    @property
    def dtype_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Of a number in a cache of keys and values."""
        return 1 if self.cache_scales else self.dtype.itemsize

    @property
    def scales(self) -> CacheScales:
        """Of the layer's cache."""
        return self.cache_scales[self.layer] if self.cache_scales else UNSCALED

    def at(self, layer: int) -> BuildContext:
        """For that layer. Tables stay shared."""
        return replace(self, layer=layer)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """A parameter to be filled by the loader; it has no memory yet."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return torch.nn.Parameter(tensor, requires_grad=False)

    def weight(self, *shape: int, kinds: Kinds = "any") -> Weight:
        """A projection's weight [.., N, K], in the format that the checkpoint has it in, if `kinds` has it, and else
        dense."""
        return Weight(shape, self.dtype, kinds)

    def rope(self, config: RopeConfig | None, head_dim: int) -> torch.Tensor:
        """The cos and sin table [max_model_len, rotary_dim], shared by layers of equal config."""
        key = (config, head_dim)
        if key not in self._tables:
            self._tables[key] = rope_table(config, self.max_model_len, self.device)
        return self._tables[key]
