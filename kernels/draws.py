# mypy: disable-error-code="no-untyped-def"
"""Jitted functions of the kernels that draw tokens: noise, levels of logits, and bisection over groups of tokens.

A sequence's tokens go in tiles of 4 · RUN, whose runs share a Philox call, and in groups of GROUP. Where a kernel has a
part of the vocabulary, tiles stay where they are in the whole: places count from the first tile that holds any of it,
and the first LEAD of them are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sample.reference import COLDEST as COLDEST_DRAW

RUN = tl.constexpr(1024)
GROUP = tl.constexpr(32)
CHUNK = tl.constexpr(128)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
COLDEST = tl.constexpr(COLDEST_DRAW)

# Trailing bits that are zero in a logit of this type once it is float32: bisection need not visit them.
ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def gumbel(word):
    """−log E, with E = −log(1 − u) by its series where u is small."""
    u = word.to(tl.uint32, bitcast=True).to(tl.float32) * (2.0**-32)
    u = tl.minimum(tl.maximum(u, 2.0**-33), LARGEST_UNIFORM)
    exponential = tl.where(u < 2.0**-10, u * (1.0 + u * (0.5 + u * (1.0 / 3.0))), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def gumbel_of(seed, position, ids):
    """Noise of tokens by their ids in the whole vocabulary."""
    none = ids * 0
    counter = ids // (4 * RUN) * RUN + ids % RUN
    word0, word1, word2, word3 = tl.philox(seed, counter, none + position, none, none)
    part = ids // RUN % 4
    word = tl.where(part == 0, word0, tl.where(part == 1, word1, tl.where(part == 2, word2, word3)))
    return gumbel(word)


@triton.jit
def step(x, ZERO_BITS: tl.constexpr):
    """Ordinal of a logit among the values of its type, ascending through zero."""
    bits = x.to(tl.int32, bitcast=True) >> ZERO_BITS
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS))).to(tl.int64)


@triton.jit
def level(step, ZERO_BITS: tl.constexpr):
    """The logit with that ordinal."""
    bits = step.to(tl.int32)
    return ((bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS))) << ZERO_BITS).to(tl.float32, bitcast=True)


@triton.jit
def inside(places, V, LEAD: tl.constexpr):
    """Which places belong to tokens of the part."""
    held = places < V
    if LEAD > 0:
        held = held & (places >= LEAD)
    return held


@triton.jit
def load_run(p_logits, first, V, LEAD: tl.constexpr):
    """Places and logits of a run; what is not a number counts as infinite, which ends the sequence."""
    places = first + tl.arange(0, RUN)
    x = tl.load(p_logits + places, mask=inside(places, V, LEAD), other=float("-inf")).to(tl.float32)
    return places, tl.where(x != x, float("inf"), x)


@triton.jit
def best_of_tile(p_logits, first, counter, seed, position, temperature, V, LEAD: tl.constexpr):
    """Of each place of the tile's runs the best score in the four of them, and where it stands. counter: of the tile's
    first token."""
    place, best = load_run(p_logits, first, V, LEAD)
    if temperature >= COLDEST:
        none = tl.zeros([RUN], dtype=tl.int32)
        counters = counter + tl.arange(0, RUN)
        word0, word1, word2, word3 = tl.philox(seed, counters, none + position, none, none)
        best = tl.div_rn(best, temperature) + gumbel(word0)
        for part in tl.static_range(1, 4):
            word = word1 if part == 1 else word2 if part == 2 else word3
            places, x = load_run(p_logits, first + part * RUN, V, LEAD)
            score = tl.div_rn(x, temperature) + gumbel(word)
            place = tl.where(score > best, places, place)
            best = tl.maximum(score, best)
    else:
        for part in tl.static_range(1, 4):
            places, x = load_run(p_logits, first + part * RUN, V, LEAD)
            place = tl.where(x > best, places, place)
            best = tl.maximum(x, best)
    return place, best


@triton.jit
def tokens_of(p_list, start, n):
    """Places of the tokens of CHUNK listed groups, and which of them are listed."""
    i = start + tl.arange(0, CHUNK)
    listed = i < n
    group = tl.load(p_list + i, mask=listed, other=0)
    places = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return places, listed[:, None]


@triton.jit
def mass(p_logits, p_list, n, bound, top, heat, log_min_p, V, IS_COUNT: tl.constexpr, LEAD: tl.constexpr):
    """Number (IS_COUNT) or weight of the listed logits that are at least `bound` and pass min_p."""
    total = tl.zeros([CHUNK, GROUP], dtype=tl.float32)
    for start in tl.range(0, n, CHUNK):
        places, listed = tokens_of(p_list, start, n)
        held = listed & inside(places, V, LEAD)
        x = tl.load(p_logits + places, mask=held, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(x - top, heat)
        kept = held & (x >= bound) & (scaled >= log_min_p)
        total += tl.where(kept, 1.0 if IS_COUNT else tl.exp(scaled), 0.0)
    return tl.sum(tl.reshape(total, [CHUNK * GROUP]), axis=0)


@triton.jit
def bound(
    p_logits,
    p_list,
    n,
    target,
    lowest,
    top,
    heat,
    log_min_p,
    V,
    IS_COUNT: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    LEAD: tl.constexpr,
):
    """A value with at least `target` at or above it, and no logit that could be left out; `lowest` if there is none."""
    below = step(lowest, ZERO_BITS)
    above = step(top, ZERO_BITS) + 1
    while above - below > 1:
        middle = below + (above - below) // 2
        reached = mass(p_logits, p_list, n, level(middle, ZERO_BITS), top, heat, log_min_p, V, IS_COUNT, LEAD)
        if reached >= target:
            below = middle
            if reached == target:
                above = middle + 1
        else:
            above = middle
    return level(below, ZERO_BITS)


@triton.jit
def bound_of(x, weights, target, lowest, top, ZERO_BITS: tl.constexpr):
    """`bound` of values x that a program holds: at least `target` of their weights stand at or above it."""
    below = step(lowest, ZERO_BITS)
    above = step(top, ZERO_BITS) + 1
    while above - below > 1:
        middle = below + (above - below) // 2
        reached = tl.sum(tl.where(x >= level(middle, ZERO_BITS), weights, 0.0), axis=0)
        if reached >= target:
            below = middle
            if reached == target:
                above = middle + 1
        else:
            above = middle
    return level(below, ZERO_BITS)
