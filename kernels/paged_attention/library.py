# mypy: disable-error-code="no-untyped-def"
"""Attention of one long line by cuDNN, which keeps the tensor cores busier than our kernel on thousands of queries.

Keys and values are copied out of their blocks first: a few microseconds for each thousand tokens. Queries see their own
chunk causally and what was cached before it in full; the two parts are merged by their log-sum-exp, as split keys are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# cuDNN makes a plan for each new shape (40 ms and more), so it gets only lines whose queries and cached tokens are
# multiples of this: a long prompt's chunks, not its rest. Head dimensions are those that it was measured with.
GRAIN = 4096
HEAD_DIMS = (64, 128)


def suits(queries: int, length: int) -> bool:
    """Whether a line of `queries` queries over `length` tokens is one for the library."""
    return queries % GRAIN == 0 and length % GRAIN == 0 and queries > 0


@triton.jit
def _merge(p_a, p_b, p_lse_a, p_lse_b, p_out, D, BLOCK: tl.constexpr):
    """out = (a·2^A + b·2^B) / (2^A + 2^B) a row, for the natural log-sum-exps of both parts."""
    i_row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    lse_a = tl.load(p_lse_a + i_row).to(tl.float32)
    lse_b = tl.load(p_lse_b + i_row).to(tl.float32)
    top = tl.maximum(lse_a, lse_b)
    weight_a = tl.exp(lse_a - top)
    weight_b = tl.exp(lse_b - top)
    a = tl.load(p_a + i_row * D + channel, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(p_b + i_row * D + channel, mask=inside, other=0.0).to(tl.float32)
    y = (a * weight_a + b * weight_b) / (weight_a + weight_b)
    tl.store(p_out + i_row * D + channel, y.to(p_out.dtype.element_ty), mask=inside)


def merge(a: torch.Tensor, b: torch.Tensor, lse_a: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """a, b [T, H, D] contiguous, lse_a, lse_b [T, H] contiguous → [T, H, D]."""
    out = torch.empty_like(a)
    rows, d = a.shape[0] * a.shape[1], a.shape[2]
    _merge[(rows,)](a, b, lse_a, lse_b, out, d, BLOCK=triton.next_power_of_2(d), num_warps=1)
    return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [G, L, D], v [G, L, D] → output [T, H, D] and log-sum-exp [T, H] float32; causal needs T = L."""
    heads = q.transpose(0, 1)[None]
    if q.device.type == "cuda":
        o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads, k[None], v[None], None, True, 0.0, causal, False, scale=scale
        )[:2]
        return o[0].transpose(0, 1).contiguous(), lse.view(q.shape[1], q.shape[0]).t().contiguous()
    group = q.shape[1] // k.shape[0]
    s = heads[0].float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    o = s.softmax(-1) @ v.float().repeat_interleave(group, 0)
    return o.transpose(0, 1).to(q.dtype).contiguous(), s.logsumexp(-1).t().contiguous()


def gathered(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """cache [N, G, block_size, D] and the blocks of a line → its first `length` entries [G, length, D]."""
    return cache.permute(1, 0, 2, 3).index_select(1, blocks).flatten(1, 2)[:, :length]


def long_line(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """The last T of `length` tokens: q [T, H, D], blocks [at least length / block_size] int32 → [T, H, D]."""
    blocks = blocks[: -(-length // k_cache.shape[2])]
    k, v = gathered(k_cache, blocks, length), gathered(v_cache, blocks, length)
    past = length - q.shape[0]
    own, own_lse = attend(q, k[:, past:], v[:, past:], scale, causal=True)
    if not past:
        return own
    before, before_lse = attend(q, k[:, :past], v[:, :past], scale, causal=False)
    return merge(own, before, own_lse, before_lse)
