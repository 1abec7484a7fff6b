"""Random weights for load_format "dummy": seeded, the same on every start, and of a scale that keeps a model lively."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch

SEED = 20250101
LOGIT_STD = 3.0
BIAS_STD = 0.02
# Norms that are stored as their difference from the model's norm offset.
OFFSET_NORMS = ("norm.weight", "q_norm", "k_norm")


class Drawn(Protocol):
    """A weight in any format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def draw(self, std: float, generator: torch.Generator) -> None:
        """Fill it with random numbers of that standard deviation."""
        ...


def fill(
    parameters: Mapping[str, torch.Tensor],
    weights: Mapping[str, Drawn],
    bounds: Mapping[str, int],
    hidden: int,
    norm_offset: float,
) -> None:
    """Fill `weights` and the `parameters` beside them; those that hold ids are named by `bounds`.

    Matrices get standard deviation 1/sqrt(fan in), so that activations keep their size through any depth.

    Embedding and head get LOGIT_STD/sqrt(hidden): logits then have a standard deviation of about LOGIT_STD, which is
    far from flat. Norm weights act as one. Tables of ids spread evenly over what they may hold. Each parameter has a
    stream of its own, so that a model's weights do not depend on the order they are filled in.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            generator = _stream(name, parameter.device)
            if name in bounds:
                # Places of a row differ: an expert is never chosen twice by one token.
                count = torch.arange(parameter.numel(), device=parameter.device) % bounds[name]
                parameter.copy_(count.view(parameter.shape))
            elif name.endswith("bias"):
                parameter.normal_(0.0, BIAS_STD, generator=generator)
            elif parameter.dim() == 1:
                offset = norm_offset if name.endswith(OFFSET_NORMS) else 0.0
                parameter.fill_(1.0 - offset)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        for name, weight in weights.items():
            outer = name in ("embed.weight", "head.weight")
            std = LOGIT_STD / hidden**0.5 if outer else weight.shape[-1] ** -0.5
            weight.draw(std, _stream(name, weight.device))


def _stream(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(SEED ^ zlib.crc32(name.encode()))
