# mypy: disable-error-code="no-untyped-def"
"""Attention of one long line by cuDNN, which keeps the tensor cores busier than our kernel on thousands of queries.

Keys and values are copied out of their blocks first: a few microseconds for each thousand tokens. Queries see their own
chunk causally and what was cached before it in full; the two parts are merged by their log-sum-exp, as split keys are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.paged_attention.gather import gather

# cuDNN makes a plan for each new shape (40 ms and more), so it gets only lines whose queries and cached tokens are
# multiples of this: a long prompt's chunks, not its rest. Head dimensions are those that it was measured with.
GRAIN = 4096
HEAD_DIMS = (64, 128)


def suits(queries: int, length: int) -> bool:
    """Whether a line of `queries` queries over `length` tokens is one for the library."""
    return queries % GRAIN == 0 and length % GRAIN == 0 and queries > 0


@triton.jit(do_not_specialize=["T"])
def _merge(
    p_own, p_before, p_own_lse, p_before_lse, p_out, T, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (a·e^A + b·e^B) / (e^A + e^B) a row, for the natural log-sum-exps of both parts, which lie [H, T]."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    channel = tl.arange(0, BLOCK_D)[None, :]
    held = token < T
    at = (token.to(tl.int64) * H + head)[:, None] * D + channel
    inside = held[:, None] & (channel < D)
    own_lse = tl.load(p_own_lse + head.to(tl.int64) * T + token, mask=held, other=0.0)
    before_lse = tl.load(p_before_lse + head.to(tl.int64) * T + token, mask=held, other=0.0)
    share = tl.sigmoid(own_lse - before_lse)[:, None]
    own = tl.load(p_own + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(p_before + at, mask=inside, other=0.0).to(tl.float32)
    y = own * share + before * (1.0 - share)
    tl.store(p_out + at, y.to(p_out.dtype.element_ty), mask=inside)


def merge(
    own: torch.Tensor, before: torch.Tensor, own_lse: torch.Tensor, before_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """own, before, out [T, H, D] and own_lse, before_lse [H, T] float32, all contiguous. out may be one of the two."""
    t, h, d = own.shape
    block_d = triton.next_power_of_2(d)
    block = 4096 // block_d
    grid = (triton.cdiv(t, block), h)
    _merge[grid](own, before, own_lse, before_lse, out, t, H=h, D=d, BLOCK_D=block_d, BLOCK=block, num_warps=4)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [G, L, D], v [G, L, D] → output [T, H, D] and log-sum-exp [H, T] float32; causal needs T = L."""
    heads = q.transpose(0, 1)[None]
    if q.device.type == "cuda":
        o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads, k[None], v[None], None, True, 0.0, causal, False, scale=scale
        )[:2]
        return o[0].transpose(0, 1).contiguous(), lse.view(q.shape[1], q.shape[0])
    group = q.shape[1] // k.shape[0]
    s = heads[0].float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    o = s.softmax(-1) @ v.float().repeat_interleave(group, 0)
    return o.transpose(0, 1).to(q.dtype).contiguous(), s.logsumexp(-1)


def long_line(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    line: int,
    length: int,
    scale: float,
) -> torch.Tensor:
    """Line `line`, whose queries are the last T of `length` tokens: q [T, H, D] → [T, H, D] contiguous."""
    k, v, padded = gather(k_cache, v_cache, block_table, context_len, line, 1, length)
    shape = (k_cache.shape[1], padded, q.shape[-1])
    k, v = k.view(shape)[:, :length], v.view(shape)[:, :length]
    past = length - q.shape[0]
    own, own_lse = attend(q, k[:, past:], v[:, past:], scale, causal=True)
    if past:
        before, before_lse = attend(q, k[:, :past], v[:, :past], scale, causal=False)
        merge(own, before, own_lse, before_lse, own)
    return own
