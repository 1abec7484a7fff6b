"""Attention over tokens that ranks share out, put together where its heads belong."""

from __future__ import annotations

import torch

from kernels.peers import Peers


def peer_merge(
    o: torch.Tensor, lse: torch.Tensor, peers: Peers, firsts: torch.Tensor, heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """Of each head h of this rank:  Σ e^(lse_r − m) o_r / Σ e^(lse_r − m) over ranks r, with m the largest lse_r.

    o [T, H, L] and lse [T, H] float32 of a rank's tokens and all heads, as `latent_partials` gives them; firsts
    [size + 1] int64 on their device: the heads of a rank begin at firsts[rank] and are `heads` here → [T, heads, L] in
    `dtype`. Where no rank has a token, zeros. All ranks must call it in the same order with as many rows. This
    definition waits for nobody: what others send is there already.
    """
    tokens, _, latent = o.shape
    stops = firsts.tolist()
    told = torch.cat([o, lse[..., None]], dim=-1)
    for to in range(peers.size):
        if to != peers.rank:
            part = told[:, stops[to] : stops[to + 1]]
            peers.held(to, 0, peers.rank, part.shape, o.dtype).copy_(part)
    parts = []
    for rank in range(peers.size):
        own = told[:, stops[peers.rank] : stops[peers.rank + 1]]
        shape = (tokens, heads, latent + 1)
        parts.append(own if rank == peers.rank else peers.held(peers.rank, 0, rank, shape, o.dtype).clone())
    peers.end_call()
    every = torch.stack(parts)
    sums = every[..., latent]
    top = sums.amax(0)
    weights = torch.exp(sums - torch.where(top == float("-inf"), 0.0, top))
    total = weights.sum(0)
    merged = (weights[..., None] * every[..., :latent]).sum(0) / torch.where(total == 0.0, 1.0, total)[..., None]
    return merged.to(dtype)
