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

from kernels.draws import (
    CHUNK,
    COLDEST,
    GROUP,
    RUN,
    ZERO_BITS,
    best_of_tile,
    bound,
    bound_of,
    gumbel_of,
    load_run,
    mass,
    tokens_of,
)
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Rows of one table, wherever they start in it.
_SETTINGS = ["p_rows", "p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_positions"]


@triton.jit
def _has_filter(temperature, top_k, top_p, min_p, V):
    return (temperature >= COLDEST) & (((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0))


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
    seed, position = tl.load(p_seeds + row), tl.load(p_positions + i_seq).to(tl.int32)
    token, best = best_of_tile(p_seq, first, i_tile * RUN, seed, position, temperature, V, LEAD=0)
    highest = tl.max(best, axis=0)
    tl.store(p_score + i_seq * tl.num_programs(1) + i_tile, highest)
    tl.store(p_token + i_seq * tl.num_programs(1) + i_tile, tl.min(tl.where(best == highest, token, V), axis=0))
    if filtered:
        for part in tl.static_range(4):
            _, x = load_run(p_seq, first + part * RUN, V, LEAD=0)
            top = tl.max(x, axis=0)
            weight = tl.where(x > float("-inf"), tl.exp(tl.div_rn(x - top, temperature)), 0.0)
            tl.store(p_max + i_run + part, top)
            tl.store(p_sum + i_run + part, tl.sum(weight, axis=0))
            p_heads = p_groups + (i_run + part) * (RUN // GROUP) + tl.arange(0, RUN // GROUP)
            tl.store(p_heads, tl.max(tl.reshape(x, [RUN // GROUP, GROUP]), axis=1))


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
    lowest = tl.minimum(top, float("-inf"))
    if by_count | (by_mass & (min_p <= 0.0)):
        lowest = bound_of(heads, tl.where(some, weights, 0.0), target, lowest, top, ZERO_BITS)
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
        low = bound(
            p_seq, p_mine, n, count, lowest, top, temperature, log_min_p, V, IS_COUNT=True, ZERO_BITS=ZERO_BITS, LEAD=0
        )
    if by_mass:
        if by_count | (min_p > 0.0):
            total = mass(p_seq, p_mine, n, low, top, temperature, log_min_p, V, IS_COUNT=False, LEAD=0)
        target = top_p * total
        low = bound(
            p_seq, p_mine, n, target, low, top, temperature, log_min_p, V, IS_COUNT=False, ZERO_BITS=ZERO_BITS, LEAD=0
        )

    seed = tl.load(p_seeds + row)
    position = tl.load(p_positions + i_seq).to(tl.int32)
    best = tl.full([CHUNK * GROUP], float("-inf"), dtype=tl.float32)
    token = tl.full([CHUNK * GROUP], 0, dtype=tl.int32) + V
    for start in tl.range(0, n, CHUNK):
        ids, listed = tokens_of(p_mine, start, n)
        x = tl.load(p_seq + ids, mask=listed & (ids < V), other=float("-inf")).to(tl.float32)
        kept = listed & (ids < V) & (x >= low) & (tl.div_rn(x - top, temperature) >= log_min_p)
        score = tl.where(kept, tl.div_rn(x, temperature) + gumbel_of(seed, position, ids), float("-inf"))
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
        ZERO_BITS=ZERO_BITS[logits.dtype],
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=16,
    )
    return tokens
