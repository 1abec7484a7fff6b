"""A sum over ranks through memory that they reach of each other, with the residual and the norm behind it."""

from __future__ import annotations

import torch

from kernels.peers import Peers
from kernels.rms_norm.reference import rms_norm
from kernels.sizes import cdiv


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

    two_shot: each rank adds up a split of the rows and sends it to all; else each adds up all rows. All ranks must call
    it in the same order with equal shapes. This definition waits for nobody: what others send is there already, in
    order and without a mark for zeros.
    """
    flat = x.flatten()
    split = flat.numel() if not two_shot else cdiv(x.shape[0], peers.size) * x.shape[1]
    others = [rank for rank in range(peers.size) if rank != peers.rank]

    def of_rank(rank: int) -> torch.Tensor:
        return flat[rank * split : (rank + 1) * split] if two_shot else flat

    for to in others:
        peers.held(to, 0, peers.rank, of_rank(to).shape, x.dtype).copy_(of_rank(to))
    own = of_rank(peers.rank)
    total = torch.zeros_like(own, dtype=torch.float32)
    for rank in range(peers.size):
        part = own if rank == peers.rank else peers.held(peers.rank, 0, rank, own.shape, x.dtype)
        total += part.float()
    summed = total.to(x.dtype)
    if two_shot:
        for to in others:
            peers.held(to, 1, peers.rank, summed.shape, x.dtype).copy_(summed)
        theirs = (peers.held(peers.rank, 1, rank, of_rank(rank).shape, x.dtype) for rank in others)
        parts = [*theirs]
        parts.insert(peers.rank, summed)
        summed = torch.cat(parts)
    summed = summed.clone().view_as(x)
    peers.end_call()
    if norm_weight is None:
        h = summed if residual is None else summed + residual
        return h, h
    return rms_norm(summed, norm_weight, eps, residual, offset)
