# mypy: disable-error-code="no-untyped-def"
"""The choice of a token's experts within a program that goes on with them: the same in every program that makes it.

Experts are ranked by integers made of each expert's logit alone, which a softmax keeps in order: no sum over experts,
which programs of other sizes would round otherwise, decides who comes first. A row of them for each warp keeps each
round within a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x, live):
    """int32 in the order of x; where not `live` below all, missing values just above that."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(live, tl.where(x == x, rank, -0x7FFFFFFE), -0x7FFFFFFF)


@triton.jit
def value_of(rank):
    """The value that has this rank."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranks(logits, num_experts, ROWS: tl.constexpr, E: tl.constexpr):
    """[ROWS, E] int32, all rows alike, in the order of the logits; padding is below all, then missing values."""
    e = tl.arange(0, E)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    live = e < num_experts
    # .cg: another kernel's memory, perhaps read before this one's wait
    x = tl.load(logits + e, mask=live, other=0.0, cache_modifier=".cg")
    return ordered(x, live)


@triton.jit
def best(rank, E: tl.constexpr):
    """The highest rank and its expert, of equal ones the first, by row; and the ranks of the others."""
    e = tl.arange(0, E)[None, :]
    top = tl.max(rank, 1)[:, None]
    expert = tl.min(tl.where(rank == top, e, E), 1)[:, None]
    return top, expert, tl.where(e == expert, -0x7FFFFFFF, rank)


@triton.jit
def place(rank, k, E: tl.constexpr):
    """The expert of place k."""
    for _ in range(k):
        _, _, rank = best(rank, E)
    _, expert, _ = best(rank, E)
    return tl.max(tl.max(expert, 1), 0)


@triton.jit
def places(rank, count, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr):
    """The experts of the first `count` places, [BLOCK_K]. A count that the compiler does not know keeps it a loop:
    unrolled, it is brought before loads that are asked for first."""
    k = tl.arange(0, BLOCK_K)[None, :]
    picked = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for i in range(count):
        _, expert, rank = best(rank, E)
        picked = tl.where(k == i, expert, picked)
    return tl.max(picked, 0)


@triton.jit
def softmax_weights(
    logits,
    picked,
    num_experts,
    scale,
    RENORMALIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    E: tl.constexpr,
):
    """The weights of the K picked experts, [BLOCK_K]: their part of a softmax over all."""
    e = tl.arange(0, E)
    x = tl.load(logits + e, mask=e < num_experts, other=float("-inf"), cache_modifier=".cg")
    chosen = tl.arange(0, BLOCK_K) < K
    own = tl.load(logits + picked, mask=chosen, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(x, 0)
    value = tl.exp(own - top) / tl.sum(tl.exp(x - top), 0)
    if RENORMALIZE:
        value = value / (tl.sum(value, 0) + 1e-20)
    return value * scale
