"""Drawing the next token in Triton, without sorting the vocabulary.

First kernel: every tile of 4096 tokens gives its best score, and of a sequence with filters every run of 1024 its
maximum and sum of weights and every group of 32 its maximum. Second kernel, one program a sequence: the best of the
tiles; or, for a sequence with filters, a bisection over the group maxima finds the few groups that can hold a kept
token, and bisections over those find the exact bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sample.reference import COLDEST as COLDEST_DRAW
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

RUN = tl.constexpr(1024)
GROUP = tl.constexpr(32)
CHUNK = tl.constexpr(128)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
COLDEST = tl.constexpr(COLDEST_DRAW)

# Rows of one table, wherever they start in it.
_SETTINGS = ["p_rows", "p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_positions"]

# Trailing bits that are zero in a logit of this type once it is float32: bisection need not visit them.
_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _gumbel(word):
    """−log E, with E = −log(1 − u) by its series where u is small."""
    u = word.to(tl.uint32, bitcast=True).to(tl.float32) * (2.0**-32)
    u = tl.minimum(tl.maximum(u, 2.0**-33), LARGEST_UNIFORM)
    exponential = tl.where(u < 2.0**-10, u * (1.0 + u * (0.5 + u * (1.0 / 3.0))), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _step(x, ZERO_BITS: tl.constexpr):
    """Ordinal of a logit among the values of its type, ascending through zero."""
    bits = x.to(tl.int32, bitcast=True) >> ZERO_BITS
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS))).to(tl.int64)


@triton.jit
def _level(step, ZERO_BITS: tl.constexpr):
    """The logit with that ordinal."""
    bits = step.to(tl.int32)
    return ((bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS))) << ZERO_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _has_filter(temperature, top_k, top_p, min_p, V):
    return (temperature >= COLDEST) & (((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _run(p_logits, first, V):
    """Ids and logits of a run; what is not a number counts as infinite, which ends the sequence."""
    ids = first + tl.arange(0, RUN)
    x = tl.load(p_logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return ids, tl.where(x != x, float("inf"), x)


@triton.jit(do_not_specialize_on_alignment=_SETTINGS)
def _runs(
    p_logits,
    p_rows,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_seeds,
    p_positions,
    p_max,
    p_sum,
    p_score,
    p_token,
    p_groups,
    logits_stride,
    runs,
    V,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    row = tl.load(p_rows + i_seq).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    filtered = _has_filter(temperature, tl.load(p_top_k + row), tl.load(p_top_p + row), tl.load(p_min_p + row), V)
    i_run = i_seq * runs + i_tile * 4
    first = i_tile * 4 * RUN
    p_seq = p_logits + i_seq * logits_stride
    token, best = _run(p_seq, first, V)
    if temperature >= COLDEST:
        counter = i_tile * RUN + tl.arange(0, RUN)
        none = tl.zeros([RUN], dtype=tl.int32)
        position = none + tl.load(p_positions + i_seq).to(tl.int32)
        word0, word1, word2, word3 = tl.philox(tl.load(p_seeds + row), counter, position, none, none)
        best = tl.div_rn(best, temperature) + _gumbel(word0)
        for part in tl.static_range(1, 4):
            word = word1 if part == 1 else word2 if part == 2 else word3
            ids, x = _run(p_seq, first + part * RUN, V)
            score = tl.div_rn(x, temperature) + _gumbel(word)
            token = tl.where(score > best, ids, token)
            best = tl.maximum(score, best)
    else:
        for part in tl.static_range(1, 4):
            ids, x = _run(p_seq, first + part * RUN, V)
            token = tl.where(x > best, ids, token)
            best = tl.maximum(x, best)
    highest = tl.max(best, axis=0)
    tl.store(p_score + i_seq * tl.num_programs(1) + i_tile, highest)
    tl.store(p_token + i_seq * tl.num_programs(1) + i_tile, tl.min(tl.where(best == highest, token, V), axis=0))
    if filtered:
        for part in tl.static_range(4):
            _, x = _run(p_seq, first + part * RUN, V)
            top = tl.max(x, axis=0)
            weight = tl.where(x > float("-inf"), tl.exp(tl.div_rn(x - top, temperature)), 0.0)
            tl.store(p_max + i_run + part, top)
            tl.store(p_sum + i_run + part, tl.sum(weight, axis=0))
            p_heads = p_groups + (i_run + part) * (RUN // GROUP) + tl.arange(0, RUN // GROUP)
            tl.store(p_heads, tl.max(tl.reshape(x, [RUN // GROUP, GROUP]), axis=1))


@triton.jit
def _tokens_of(p_list, start, n):
    """Ids of the tokens of CHUNK listed groups, and which of them are listed."""
    i = start + tl.arange(0, CHUNK)
    listed = i < n
    group = tl.load(p_list + i, mask=listed, other=0)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return ids, listed[:, None]


@triton.jit
def _mass(p_logits, p_list, n, bound, top, heat, log_min_p, V, IS_COUNT: tl.constexpr):
    """Number (IS_COUNT) or weight of the listed logits that are at least `bound` and pass min_p."""
    total = tl.zeros([CHUNK, GROUP], dtype=tl.float32)
    for start in tl.range(0, n, CHUNK):
        ids, listed = _tokens_of(p_list, start, n)
        x = tl.load(p_logits + ids, mask=listed & (ids < V), other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(x - top, heat)
        inside = listed & (ids < V) & (x >= bound) & (scaled >= log_min_p)
        total += tl.where(inside, 1.0 if IS_COUNT else tl.exp(scaled), 0.0)
    return tl.sum(tl.reshape(total, [CHUNK * GROUP]), axis=0)


@triton.jit
def _bound(
    p_logits, p_list, n, target, lowest, top, heat, log_min_p, V, IS_COUNT: tl.constexpr, ZERO_BITS: tl.constexpr
):
    """A value with at least `target` at or above it, and no logit that could be left out; `lowest` if there is none."""
    below = _step(lowest, ZERO_BITS)
    above = _step(top, ZERO_BITS) + 1
    while above - below > 1:
        middle = below + (above - below) // 2
        reached = _mass(p_logits, p_list, n, _level(middle, ZERO_BITS), top, heat, log_min_p, V, IS_COUNT)
        if reached >= target:
            below = middle
            if reached == target:
                above = middle + 1
        else:
            above = middle
    return _level(below, ZERO_BITS)


@triton.jit(do_not_specialize_on_alignment=_SETTINGS)
def _choose(
    p_logits,
    p_rows,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_seeds,
    p_positions,
    p_max,
    p_sum,
    p_score,
    p_token,
    p_groups,
    p_list,
    p_tokens,
    logits_stride,
    runs,
    V,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_seq = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_seq).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    top_k = tl.load(p_top_k + row)
    top_p = tl.load(p_top_p + row)
    min_p = tl.load(p_min_p + row)
    run = tl.arange(0, BLOCK_RUNS)
    m_run = run < runs
    tiles = runs // 4
    scores = tl.load(p_score + i_seq * tiles + run, mask=run < tiles, other=float("-inf"))
    best = tl.max(scores, axis=0)
    if (best == float("inf")) | (best == float("-inf")):
        tl.store(p_tokens + i_seq, -1)
        return
    if not _has_filter(temperature, top_k, top_p, min_p, V):
        tokens = tl.load(p_token + i_seq * tiles + run, mask=run < tiles, other=V)
        token = tl.min(tl.where(scores == best, tokens, V), axis=0)
        tl.store(p_tokens + i_seq, token.to(tl.int64))
        return

    maxima = tl.load(p_max + i_seq * runs + run, mask=m_run, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    by_count = (top_k > 0) & (top_k < V)
    by_mass = top_p < 1.0
    log_min_p = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
    sums = tl.load(p_sum + i_seq * runs + run, mask=m_run, other=0.0)
    total = tl.sum(tl.where(m_run, sums * tl.exp(tl.div_rn(maxima - top, temperature)), 0.0), axis=0)

    # A group's maximum is one token, and one weight, at or above it: enough maxima make a bound on what is kept.
    group = tl.arange(0, BLOCK_GROUPS)
    groups = runs * (RUN // GROUP)
    m_group = group < groups
    heads = tl.load(p_groups + i_seq * groups + group, mask=m_group, other=float("-inf"))
    scaled = tl.div_rn(heads - top, temperature)
    weights = tl.where(by_count, 1.0, tl.exp(scaled))
    some = m_group & (scaled >= log_min_p)
    target = tl.where(by_count, top_k.to(tl.float32), top_p * total)
    below = _step(tl.minimum(top, float("-inf")), ZERO_BITS)
    above = _step(top, ZERO_BITS) + 1
    if by_count | (by_mass & (min_p <= 0.0)):
        while above - below > 1:
            middle = below + (above - below) // 2
            reached = tl.sum(tl.where(some & (heads >= _level(middle, ZERO_BITS)), weights, 0.0), axis=0)
            if reached >= target:
                below = middle
                if reached == target:
                    above = middle + 1
            else:
                above = middle
    lowest = _level(below, ZERO_BITS)
    some = some & (heads >= lowest)
    place = tl.cumsum(some.to(tl.int32), axis=0) - 1
    p_mine = p_list + i_seq * groups
    tl.store(p_mine + place, group, mask=some)
    n = tl.sum(some.to(tl.int32), axis=0)
    tl.debug_barrier()

    p_seq = p_logits + i_seq * logits_stride
    low = lowest
    if by_count:
        count = top_k.to(tl.float32)
        low = _bound(
            p_seq, p_mine, n, count, lowest, top, temperature, log_min_p, V, IS_COUNT=True, ZERO_BITS=ZERO_BITS
        )
    if by_mass:
        if by_count | (min_p > 0.0):
            total = _mass(p_seq, p_mine, n, low, top, temperature, log_min_p, V, IS_COUNT=False)
        mass = top_p * total
        low = _bound(p_seq, p_mine, n, mass, low, top, temperature, log_min_p, V, IS_COUNT=False, ZERO_BITS=ZERO_BITS)

    seed = tl.load(p_seeds + row)
    position = tl.load(p_positions + i_seq).to(tl.int32)
    best = tl.full([CHUNK * GROUP], float("-inf"), dtype=tl.float32)
    token = tl.full([CHUNK * GROUP], 0, dtype=tl.int32) + V
    for start in tl.range(0, n, CHUNK):
        ids, listed = _tokens_of(p_mine, start, n)
        x = tl.load(p_seq + ids, mask=listed & (ids < V), other=float("-inf")).to(tl.float32)
        kept = listed & (ids < V) & (x >= low) & (tl.div_rn(x - top, temperature) >= log_min_p)
        none = ids * 0
        counter = ids // (4 * RUN) * RUN + ids % RUN
        word0, word1, word2, word3 = tl.philox(seed, counter, none + position, none, none)
        part = ids // RUN % 4
        word = tl.where(part == 0, word0, tl.where(part == 1, word1, tl.where(part == 2, word2, word3)))
        score = tl.where(kept, tl.div_rn(x, temperature) + _gumbel(word), float("-inf"))
        score = tl.reshape(score, [CHUNK * GROUP])
        ids = tl.reshape(ids, [CHUNK * GROUP])
        better = (score > best) | ((score == best) & (ids < token))
        token = tl.where(better, ids, token)
        best = tl.where(better, score, best)
    highest = tl.max(best, axis=0)
    drawn = tl.min(tl.where(best == highest, token, V), axis=0)
    tl.store(p_tokens + i_seq, drawn.to(tl.int64))


def sample(
    workspace: Workspace,
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """token = argmax over the kept set of logit / temperature + Gumbel noise; the lowest id on ties.

    Kept, in this order (ties with the last kept logit stay, so the set does not depend on token order):
        min_p   softmax(logit / temperature) ≥ min_p · its maximum
        top_k   the k largest
        top_p   the fewest of what is left, largest first, whose probability (of what is left) reaches top_p
    Noise: Philox4x32-10 (Salmon et al. 2011) keyed by (seed, position, token), the reference's numbers bit for bit.

    Shapes as in the reference; logits' sequences may be strided. Sequences without filters cost one read of the logits.
    A sequence with filters costs one program besides, over the groups whose maximum can be kept: few when the
    distribution is peaked, all of the vocabulary when it is flat.
    """
    seqs, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(seqs, dtype=torch.int64, device=device)
    if not seqs:
        return tokens
    pdl = workspace.pdl
    tiles = cdiv(vocab, 4 * RUN.value)
    runs = 4 * tiles
    groups = runs * (RUN.value // GROUP.value)
    run_max, run_sum = torch.empty((2, seqs, runs), dtype=torch.float32, device=device).unbind()
    tile_score = torch.empty((seqs, tiles), dtype=torch.float32, device=device)
    tile_token = torch.empty((seqs, tiles), dtype=torch.int32, device=device)
    group_max = torch.empty((seqs, groups), dtype=torch.float32, device=device)
    group_list = torch.empty((seqs, groups), dtype=torch.int32, device=device)
    settings = (rows, temperature, top_k, top_p, min_p, seeds, positions)
    found = (run_max, run_sum, tile_score, tile_token, group_max)
    workspace.launch(_runs, (seqs, tiles))(
        logits, *settings, *found, logits.stride(0), runs, vocab, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    workspace.launch(_choose, (seqs,))(
        logits,
        *settings,
        *found,
        group_list,
        tokens,
        logits.stride(0),
        runs,
        vocab,
        BLOCK_RUNS=next_power_of_2(runs),
        BLOCK_GROUPS=next_power_of_2(groups),
        ZERO_BITS=_ZERO_BITS[logits.dtype],
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=16,
    )
    return tokens
