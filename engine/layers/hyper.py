"""Hyper-connections as layers (Xie et al. 2026): what stands between residual streams and the parts of a layer."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.build import Build
from engine.models.config import HyperConfig


class HyperConnection(nn.Module):
    """Gives a layer part its input, and merges its output into the streams."""

    def __init__(self, config: HyperConfig, build: Build) -> None:
        super().__init__()
        self._config = config
        width, outputs = config.streams * build.config.hidden, config.streams * (2 + config.streams)
        self.fn = build.empty(outputs, width, dtype=torch.float32)
        self.base = build.empty(outputs, dtype=torch.float32)
        self.scale = build.empty(3, dtype=torch.float32)
        self._norm_eps = build.config.norm.eps
        self._ops = build.ops

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, N, hidden] → the part's input [T, hidden], and post [T, N] and comb [T, N, N] for `merge`."""
        config = self._config
        return self._ops.hyper_mix(
            streams, self.fn, self.base, self.scale, self._norm_eps, config.iterations, config.eps
        )

    def merge(self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The part's output y [T, hidden] joins the streams: [T, N, hidden]."""
        return self._ops.hyper_merge(y, streams, post, comb)


class HyperHead(nn.Module):
    """Σₙ (sigmoid(mₙ · scale + baseₙ) + eps) · streamₙ with m = fn · x / rms(x) over all streams of a token."""

    def __init__(self, config: HyperConfig, build: Build) -> None:
        super().__init__()
        self._eps = config.eps
        self.fn = build.empty(config.streams, config.streams * build.config.hidden, dtype=torch.float32)
        self.base = build.empty(config.streams, dtype=torch.float32)
        self.scale = build.empty(1, dtype=torch.float32)
        self._norm_eps = build.config.norm.eps

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [T, N, hidden] → [T, hidden]. Once a step, so torch's own operations do."""
        x = streams.flatten(1).float()
        m = (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._norm_eps)) @ self.fn.T
        weights = torch.sigmoid(m * self.scale + self.base) + self._eps
        return (weights[..., None] * streams.float()).sum(dim=1).to(streams.dtype)
