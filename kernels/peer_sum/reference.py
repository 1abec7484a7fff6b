"""A sum over ranks through memory that they reach of each other, with the residual and the norm behind it."""

from __future__ import annotations

import torch

from kernels.peers import Peers, flag_bytes
from kernels.rms_norm.reference import rms_norm


def peer_sum(
    x: torch.Tensor,
    peers: Peers,
    two_shot: bool = False,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + Σ x over ranks;  y = h / sqrt(mean(h²) + eps) * (norm_weight + offset), or h without norm_weight.

    x, residual [T, E] (contiguous, at most peers.capacity bytes), norm_weight [E] → y, h, both [T, E] in x's dtype. The
    sum is computed in float32 in the order of ranks and rounded once, then what `rms_norm` does with a residual: every
    rank gets the same bits, and both ways do.

    two_shot: each rank adds up a share of the rows and sends it to all; else each adds up all rows. All ranks must call
    it in the same order with equal shapes. This definition waits for nobody: what others send is there already.
    """
    place = flag_bytes(peers.size) + (int(peers.calls[0]) + 1) % 2 * peers.half
    size = x.numel() * x.element_size()
    sent = [piece[place : place + size].view(x.dtype).view_as(x) for piece in peers.pieces]
    sent[peers.rank].copy_(x)
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in sent:
        total += part.float()
    summed = total.to(x.dtype)
    peers.calls[0] += 1
    if norm_weight is None:
        h = summed if residual is None else summed + residual
        return h, h
    return rms_norm(summed, norm_weight, eps, residual, offset)
