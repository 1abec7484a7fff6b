"""Gated activation (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def is_silu(activation: str) -> bool:
    """Which of the two it is. Raises ValueError for another."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} is not implemented: use 'silu' or 'gelu_tanh'")
    return activation == "silu"


def gated_activation(x: torch.Tensor, activation: str = "silu", limit: float | None = None) -> torch.Tensor:
    """y = act(x[:, :F]) * x[:, F:], in float32, rounded once. A limit clips gate above and up on both sides first.

    x [T, 2F] (gate, then up) → [T, F]. activation: "silu" or "gelu_tanh"; ValueError for another.
    """
    silu = is_silu(activation)
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    act = F.silu(gate) if silu else F.gelu(gate, approximate="tanh")
    return (act * up).to(x.dtype)
