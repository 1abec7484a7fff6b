"""Depthwise causal convolution of a mixed batch, with the inputs it still needs kept a request."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.batch import AttentionBatch


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    deterministic: bool = False,
) -> torch.Tensor:
    """y[t] = silu(Σⱼ weight[:, j] ∘ x[t − W + 1 + j]) over the tokens of a sequence; state keeps its last R inputs.

    Inputs before the sequence's tokens come from state[state_slots[i]], where the input of position p stands in place
    p % R; those before a request's first token are zeros. Sequences of state slot 0 are padding. With R = W + k places
    the last k tokens of a sequence may be taken back: what is needed of those before them is still there.

    x [T, C]; weight [C, W]; state [S, R, C] with R ≥ W, written in place; state_slots [B] int64; query_start [B+1],
    context_len [B] int32 → [T, C] in x's dtype, computed in float32.
    deterministic: a token's result has the same bits whatever else the batch holds and however prompts are chunked.
    """
    out = torch.empty_like(x)
    starts, lens, slots = batch.query_start.tolist(), batch.context_len.tolist(), state_slots.tolist()
    width, held = weight.shape[1], state.shape[1]
    for i, slot in enumerate(slots):
        lo, hi = starts[i], starts[i + 1]
        if hi == lo:
            continue
        first = lens[i] - (hi - lo)
        before = torch.arange(first - (width - 1), first, device=x.device)
        past = torch.where((before >= 0)[:, None], state[slot, before % held], 0)
        seq = torch.cat((past.to(x.dtype), x[lo:hi]))
        if deterministic:
            y = sum((weight[:, j].float() * seq[j : j + hi - lo].float() for j in range(width)), torch.zeros(()))
        else:
            y = F.conv1d(seq.float().T[None], weight.float()[:, None], groups=x.shape[1])[0].T
        out[lo:hi] = F.silu(y).to(x.dtype)
        last = min(held, hi - lo)
        places = torch.arange(lens[i] - last, lens[i], device=x.device) % held
        state[slot, places] = x[hi - last : hi].to(state.dtype)
    return out
