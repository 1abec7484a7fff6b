# mypy: disable-error-code="no-untyped-def"
"""The choice of a prompt's experts and the places of its pairs within their experts, in one launch.

Each program chooses for some tokens and takes places from the experts' counters; the last to arrive adds these up.
Where pairs then stand in tiles is another launch: every pair's tile depends on all counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_gemm.order import Places, add_up, counters, in_tiles
from kernels.moe_route.choose import Choice, choose, summed
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Tokens of a program, and integers from one counter to the next: counters that share a sequence of the cache are added
# to in turn.
_TOKENS, _APART = 4, 32


@triton.jit(do_not_specialize=["tokens"])
def choose_and_count(
    partials,
    bias,
    weights,
    experts,
    counts,
    rank,
    offsets,
    ends,
    tokens,
    num_experts,
    scale,
    SPLITS: tl.constexpr,
    HOW: tl.constexpr,
    ROWS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """partials [SPLITS, tokens, E] sum to the logits. counts, APART from one another, holds zeros before and after; its
    entry behind all E + SHARED experts, BLOCK_C or fewer with it, counts programs. ROWS as in `moe_gemm.order`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    K: tl.constexpr = HOW.top_k
    SHARED: tl.constexpr = HOW.shared
    width: tl.constexpr = K + SHARED
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    x = summed(partials, token, tokens, num_experts, SPLITS, HOW.block_e)
    picked = choose(x, token, live, bias, None, None, weights, experts, num_experts, scale, HOW, BLOCK_T)
    k = tl.arange(0, HOW.block_k)[None, :]
    routed = live[:, None] & (k < K)
    place = tl.atomic_add(counts + picked * APART, 1, mask=routed, sem="relaxed")
    if SHARED > 0:
        # every token has a pair with each of these
        place = tl.where(k < K, place, token.to(tl.int32)[:, None])
    tl.store(rank + token[:, None] * width + k, place, mask=live[:, None] & (k < width))
    every = num_experts + SHARED
    tl.debug_barrier()
    if tl.atomic_add(counts + every * APART, 1, sem="acq_rel", scope="gpu") < tl.num_programs(0) - 1:
        return
    add_up(counts, offsets, ends, every, tokens, ROWS, BLOCK_C, SHARED, APART)


def chosen_in_tiles(
    workspace: Workspace, partials: torch.Tensor, bias: torch.Tensor | None, rows: int, scale: float, how: Choice
) -> tuple[torch.Tensor, torch.Tensor, Places]:
    """Weights and experts [T, K + S] of `partials` [splits, T, E], and their pairs in tiles of `rows`. The choice is
    not by token id. Calls on a device share their counters: they must run in one stream order."""
    splits, t, e = partials.shape
    device, every, width = partials.device, e + how.shared, how.top_k + how.shared

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty(t, width, dtype=torch.float32, device=device)
    experts, rank, offsets, ends = integers(t, width), integers(t, width), integers(every + 1), integers(every)
    workspace.launch(choose_and_count, (cdiv(t, _TOKENS),))(
        partials, bias, weights, experts, counters(workspace, every, _APART), rank, offsets, ends, t, e, scale,
        SPLITS=splits, ROWS=rows, APART=_APART, BLOCK_T=_TOKENS, BLOCK_C=next_power_of_2(every + 1),
        HOW=how, PDL=workspace.pdl, launch_pdl=workspace.pdl, num_warps=4,
    )  # fmt: skip
    return weights, experts, in_tiles(workspace, experts, rank, offsets, ends, rows)
