"""Hyper-connections as layers (Xie et al. 2026): what stands between residual streams and the parts of a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.build_context import BuildContext
from engine.models.config import HyperConfig


class HyperConnection(nn.Module):
    """Gives a layer part its input, and merges its output into the streams."""

    def __init__(self, config: HyperConfig, build: BuildContext) -> None:
        super().__init__()
        self._config = config
        width, outputs = config.streams * build.config.hidden, config.streams * (2 + config.streams)
        self.fn = build.empty(outputs, width, dtype=torch.float32)
        self.base = build.empty(outputs, dtype=torch.float32)
        self.scale = build.empty(3, dtype=torch.float32)
        self._norm_eps = build.config.norm.eps
        self._ops = build.ops
        self._deterministic = build.deterministic

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, N, hidden] → the part's input [T, hidden], and post [T, N] and comb [T, N, N] for `merge`."""
        config = self._config
        weights, how = (self.fn, self.base, self.scale), (self._norm_eps, config.iterations, config.eps)
        return self._ops.hyper_mix(streams, *weights, *how, deterministic=self._deterministic)

    def merge(self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The part's output y [T, hidden] joins the streams: [T, N, hidden]."""
        return self._ops.hyper_merge(y, streams, post, comb)


class HyperHead(nn.Module):
    """Σₙ (sigmoid(mₙ · scale + baseₙ) + eps) · streamₙ with m = fn · x / rms(x) over all streams of a token."""

    def __init__(self, config: HyperConfig, build: BuildContext) -> None:
        super().__init__()
        self._eps = config.eps
        self.fn = build.empty(config.streams, config.streams * build.config.hidden, dtype=torch.float32)
        self.base = build.empty(config.streams, dtype=torch.float32)
        self.scale = build.empty(1, dtype=torch.float32)
        self._norm_eps = build.config.norm.eps
        self._ops = build.ops
        self._deterministic = build.deterministic

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [T, N, hidden] → [T, hidden]. Once a step, so torch's own operations do, unless their sums must not
        hang on T: then it is the input that a mix of these weights gives."""
        if self._deterministic:
            more = len(self.base) * (1 + len(self.base))
            fn, base, scale = F.pad(self.fn, (0, 0, 0, more)), F.pad(self.base, (0, more)), self.scale.expand(3)
            how = (self._norm_eps, 1, self._eps)
            mixed: torch.Tensor = self._ops.hyper_mix(streams, fn, base, scale.contiguous(), *how, deterministic=True)[
                0
            ]
            return mixed
        x = streams.flatten(1).float()
        m = (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._norm_eps)) @ self.fn.T
        weights = torch.sigmoid(m * self.scale + self.base) + self._eps
        return (weights[..., None] * streams.float()).sum(dim=1).to(streams.dtype)
