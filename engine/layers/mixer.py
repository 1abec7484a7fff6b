"""What a mixer is called with, as one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.tensors import LayerCache
from engine.layers.norm import RmsNorm
from engine.runner.batch import DeviceBatch, LastTokens


@dataclass(frozen=True, slots=True)
class MixerInput:
    """A mixer's `forward` takes it, and gives residual + mix(norm(x)) and that sum's norm by `next_norm`
    (`Linear.forward_with_next_norm`), both [T, hidden], or [B, hidden] of the entries' `last_tokens`.

    x         [T, hidden]  the residual stream, which the mixer norms by `norm`; None takes it as it is
    caches    the layer's, in the order of the mixer's `specs`
    residual  [T, hidden], or [B, hidden] with `last_tokens`: what is added to the result; None adds nothing
    """

    x: torch.Tensor
    norm: RmsNorm | None
    batch: DeviceBatch
    caches: tuple[LayerCache, ...]
    residual: torch.Tensor | None = None
    last_tokens: LastTokens | None = None
    next_norm: RmsNorm | None = None
