"""Columns of all ranks, through memory that they reach of each other."""

from __future__ import annotations

import torch

from kernels.peers import Peers


def peer_gather(x: torch.Tensor, peers: Peers, firsts: torch.Tensor, columns: int) -> torch.Tensor:
    """x [T, C] of each rank → [T, columns], in x's dtype: those of a rank from firsts[rank] to firsts[rank + 1].

    x is contiguous, with no more bytes than peers.slot, also on other ranks; firsts [size + 1] int64 on x's device.
    A zero loses its sign. All ranks must call it in the same order with as many rows. This definition waits for
    nobody: what others send is there already.
    """
    tokens, stops = len(x), firsts.tolist()
    assert x.shape[1] == stops[peers.rank + 1] - stops[peers.rank]
    parts = []
    for to in range(peers.size):
        if to != peers.rank:
            peers.held(to, 0, peers.rank, x.shape, x.dtype).copy_(x)
    for rank in range(peers.size):
        shape = (tokens, stops[rank + 1] - stops[rank])
        parts.append(x if rank == peers.rank else peers.held(peers.rank, 0, rank, shape, x.dtype).clone())
    peers.end_call()
    return torch.cat(parts, dim=1) + 0.0
