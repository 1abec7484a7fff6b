"""Token embedding as a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build_context import BuildContext


class Embedding(nn.Module):
    """Rows of a table, by token id, times the model's embedding scale."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self._vocabulary = build.vocabulary
        self._alone = build.communicator.size == 1
        self.weight = build.weight(self._vocabulary.count, build.config.hidden)
        self._dtype = build.dtype
        self._scale = build.config.embedding_scale
        self._op = build.ops.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int32 → [T, hidden]."""
        if self._alone:
            return self._op(ids, self.weight.value, self._dtype, self._scale)
        local, here = self._vocabulary.own(ids)
        return self._vocabulary.sum(self._op(local, self.weight.value, self._dtype, self._scale), here)
