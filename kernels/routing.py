"""How experts are chosen, as every op sees it that chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """s = score(logits); the `top_k` largest of s + bias are chosen; w = s[chosen] (/ Σ s[chosen]) · scale.

    score        "softmax", "sigmoid" or "sqrtsoftplus" (√ln(1 + eˣ))
    bias         [E] float32  corrects the choice alone, or is added to the logits, by `bias_of`
    num_groups   with more than 1, experts outside of the `top_groups` best groups are not chosen. A group is worth the
                 "max" or the sum of the "top2" of its s + bias, by `group_score` (DeepSeek-V3 2024, arXiv:2412.19437)
    renormalize  weights are divided by their sum
    num_shared   experts numbered from E on, behind the chosen ones, of weight 1
    table        [V, K] int  gives the choice by token id instead
    first        where some experts' matrices are elsewhere, the first whose are here: numbers are given less it
    """

    top_k: int
    score: str = "softmax"
    bias: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    renormalize: bool = True
    scale: float = 1.0
    num_shared: int = 0
    table: torch.Tensor | None = None
    first: int = 0
    bias_of: Literal["choice", "logits"] = "choice"

    @property
    def width(self) -> int:
        """Experts of a token."""
        return self.top_k + self.num_shared


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """What experts add to their products: gate_up [E, 2F], down [E, M]."""

    gate_up: torch.Tensor
    down: torch.Tensor
