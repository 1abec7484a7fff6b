"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) of the last channels of a head."""

from __future__ import annotations

import torch


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., D] float32 with its last R channels turned in pairs (2i, 2i + 1); cos and sin [..., R/2]."""
    plain = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., plain::2], x[..., plain + 1 :: 2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :plain], turned), dim=-1)


def rotate_tail(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with its last R channels turned by the angles of its positions, in pairs (2i, 2i + 1).

    positions [T] int32; cos_sin [*, R] float32, cos first → [T, H, D] in x's dtype. Computed in float32.
    """
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
    return turn(x.float(), cos, sin).to(x.dtype)
