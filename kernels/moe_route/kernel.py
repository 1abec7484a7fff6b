# mypy: disable-error-code="no-untyped-def"
"""Choice and weights of the experts.

A few tokens take one launch: programs norm the token's row again, each for its own experts' scores, and the last to
arrive chooses. More tokens, or those of a large router, which that launch reads again for each, take three: the norm,
the scores on tensor cores (inputs split over programs), the choice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe_route.choose import Choice, choose, summed
from kernels.moe_route.logits import logit_partials
from kernels.moe_route.scores import row_scores
from kernels.rms_norm.kernel import rms_norm
from kernels.routing import Routing
from kernels.sizes import cdiv, next_power_of_2
from kernels.thresholds import NORMED_ROWS
from kernels.workspace import Workspace

ONE_LAUNCH_TOKENS = NORMED_ROWS
# Bytes that one launch may read of the router, once for each token, where others would be two; where they would norm as
# well, twice as many.
ONE_LAUNCH_BYTES = 16 << 20
# Router values that a program of `_few` holds in registers.
_VALUES = 8192


@triton.jit
def _few(
    x,
    norm,
    router,
    bias,
    table,
    token_ids,
    h,
    logits,
    weights,
    experts,
    arrived,
    num_experts,
    hidden,
    x_stride,
    eps,
    offset,
    scale,
    NORM: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """`row_scores`; a token's last program to arrive chooses."""
    row_scores(x, norm, router, h, logits, num_experts, hidden, x_stride, eps, offset, NORM, BLOCK_N, BLOCK_M, PDL)
    t = tl.program_id(1).to(tl.int64)
    tl.debug_barrier()
    if tl.atomic_add(arrived + t, 1, sem="acq_rel", scope="gpu") < tl.num_programs(0) - 1:
        return
    tl.store(arrived + t, 0)
    e = tl.arange(0, HOW.block_e)
    own = tl.load(logits + t * num_experts + e, mask=e < num_experts, other=float("-inf"), cache_modifier=".cg")
    one = tl.arange(0, 1)
    choose(
        own[None, :], t + one, one == 0, bias, table, token_ids, weights, experts, num_experts, scale, HOW, 1
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    partials,
    bias,
    table,
    token_ids,
    weights,
    experts,
    tokens,
    num_experts,
    scale,
    SPLITS: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    x = summed(partials, token, tokens, num_experts, SPLITS, HOW.block_e)
    choose(
        x, token, token < tokens, bias, table, token_ids, weights, experts, num_experts, scale, HOW, BLOCK_T
    )  # fmt: skip


def moe_route(
    workspace: Workspace,
    x: torch.Tensor,
    router: torch.Tensor,
    routing: Routing,
    token_ids: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. Calls on a device share their arrival counters: they must run in one stream order."""
    t, hidden = x.shape
    e = router.shape[0]
    width, bias, table, scale = routing.width, routing.bias, routing.table, routing.scale
    weights = torch.empty(t, width, dtype=torch.float32, device=x.device)
    experts = torch.empty(t, width, dtype=torch.int32, device=x.device)
    if not t:
        return x, weights, experts
    pdl = workspace.pdl
    how = choice(e, routing)
    launch: dict[str, Any] = {"HOW": how, "PDL": pdl, "launch_pdl": pdl}
    if deterministic or in_one_launch(t, router.nbytes, norm_weight is not None):
        block_m = next_power_of_2(hidden)
        block_n = max(1, min(_VALUES // block_m, next_power_of_2(e)))
        h = x if norm_weight is None else torch.empty(t, hidden, dtype=x.dtype, device=x.device)
        logits = torch.empty(t, e, dtype=torch.float32, device=x.device)
        arrived = workspace.counters("tokens of a router", next_power_of_2(max(t, ONE_LAUNCH_TOKENS)))
        workspace.launch(_few, (cdiv(e, block_n), t))(
            x, norm_weight, router, bias, table, token_ids, h, logits, weights, experts, arrived,
            e, hidden, x.stride(0), eps, offset, scale, NORM=norm_weight is not None, BLOCK_N=block_n, BLOCK_M=block_m,
            num_warps=4 if block_n * block_m <= 2 * _VALUES else 16, **launch,
        )  # fmt: skip
        return h, weights, experts
    h = x if norm_weight is None else rms_norm(workspace, x, norm_weight, eps, offset=offset)[0]
    partials = logit_partials(workspace, h, router)
    each = 1 if t <= 1024 else 4
    workspace.launch(_choose, (cdiv(t, each),))(
        partials, bias, table, token_ids, weights, experts, t, e, scale, SPLITS=len(partials), BLOCK_T=each,
        num_warps=4 if each == 1 or e > 128 else 1, **launch,
    )  # fmt: skip
    return h, weights, experts


def in_one_launch(tokens: int, router_bytes: int, normed: bool) -> bool:
    """Whether one launch scores and chooses, unless results must not depend on how many tokens there are."""
    most = ONE_LAUNCH_BYTES << int(normed)
    return tokens <= ONE_LAUNCH_TOKENS and (tokens == 1 or tokens * router_bytes <= most)


def choice(num_experts: int, routing: Routing) -> Choice:
    """The constants of a choice among `num_experts`."""
    return Choice(
        routing.score,
        "nothing" if routing.bias is None else routing.bias_of,
        routing.table is not None,
        routing.num_groups,
        routing.top_groups,
        routing.group_score == "top2",
        routing.renormalize,
        routing.top_k,
        routing.num_shared,
        next_power_of_2(routing.width),
        next_power_of_2(num_experts),
        next_power_of_2(routing.num_groups),
        routing.first,
    )
