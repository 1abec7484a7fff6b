"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) between its projections: convolution, delta rule, gated norm."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch
from kernels.causal_conv.reference import causal_conv
from kernels.gated_delta.reference import gated_delta
from kernels.gated_norm.reference import gated_norm


def delta_net(
    x: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    num_key_heads: int,
    deterministic: bool = False,
) -> torch.Tensor:
    """y = gated_norm(gated_delta(causal_conv(x)), z), as these three ops are defined.

    x [T, 2·Hk·Dk + H·Dv]; z [T, H·Dv]; a, b [T, H]; conv_weight [C, W], conv_state [S, R, C]; a_log, dt_bias [H];
    state [S, H, Dk, Dv] float32; norm_weight [Dv]; state_slots [B] int64; query_start [B+1], context_len [B] int32 →
    [T, H·Dv] in x's dtype. conv_state and state are written in place,
    state as far as `batch.num_kept` says.
    deterministic: a token's result has the same bits whatever else the batch holds and however prompts are chunked.
    """
    qkv = causal_conv(x, conv_weight, conv_state, state_slots, batch, deterministic)
    o = gated_delta(qkv, a, b, a_log, dt_bias, state, state_slots, batch, num_key_heads, deterministic)
    assert o is not None
    return gated_norm(o, z, norm_weight, eps)
