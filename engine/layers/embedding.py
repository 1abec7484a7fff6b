"""Token embedding as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build


class Embedding(nn.Module):
    """Rows of a table, by token id, times the model's embedding scale."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(build.config.vocab_size, build.config.hidden)
        self._dtype = build.dtype
        self._scale = build.config.embedding_scale
        self._op = build.ops.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int32 → [T, hidden]."""
        return self._op(ids, self.weight.value, self._dtype, self._scale)
