"""Which kernels route tokens to dense experts and compute these, decided once a shape: where that is faster, with fewer
launches than choice and products have by themselves. Thresholds and tiles were measured on an H200."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.dispatch import Dispatch, Variant
from kernels.moe.count import chosen_in_tiles
from kernels.moe.lists import MAX_EXPERTS, chosen_in_lists
from kernels.moe.rows import routed_rows_moe
from kernels.moe.scores import scored
from kernels.moe_gemm import dense
from kernels.moe_gemm.dispatch import RowsCut, TilesCut, many_pairs, pair_tiles, row_tiles
from kernels.moe_gemm.grouped import PAIRS, grouped_moe
from kernels.moe_gemm.order import CHUNK, Lists
from kernels.moe_gemm.rows import RowTile
from kernels.moe_gemm.tiles import tiles_moe
from kernels.moe_gemm.tma_ring import MAX_INNER, MAX_ROWS, Rings, lists_moe, ring_tiles
from kernels.moe_route.kernel import ONE_LAUNCH_TOKENS, choice, moe_route
from kernels.moe_route.logits import BF16_THIRDS_TOKENS, logit_partials
from kernels.rms_norm.kernel import rms_norm
from kernels.routing import ExpertBiases, Routing
from kernels.tuned.tables import DEFAULT, numbers, tiles
from kernels.weight import Dense
from kernels.workspace import Workspace


class Problem(NamedTuple):
    """What the choice of kernels depends on.

    pairs of token and expert; experts whose matrices are here, shared ones too; routed: those that the router scores;
    inner channels of each. alone: the choice has to stand by itself. plain: it is the highest of the scores. by_token:
    it goes by token ids, which may name an expert twice. rings, groups: what the kernels of those names can read and
    write in whole boxes, on a GPU of their kind. bulk: a copy engine reads rows of the matrices. table: of tuned
    numbers.
    """

    tokens: int
    pairs: int
    experts: int
    routed: int
    inner: int
    dtype: torch.dtype
    alone: bool
    plain: bool
    by_token: bool
    rings: bool
    groups: bool
    bulk: bool
    multiprocessors: int
    table: str = DEFAULT


class Operands(NamedTuple):
    """As in the reference; tables of experts are dense."""

    workspace: Workspace
    x: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    routing: Routing
    token_ids: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    offset: float
    residual: torch.Tensor | None
    activation: str
    limit: float | None
    deterministic: bool
    biases: ExpertBiases | None

    def normed(self) -> torch.Tensor:
        if self.norm_weight is None:
            return self.x.contiguous()
        return rms_norm(self.workspace, self.x, self.norm_weight, self.eps, offset=self.offset)[0].contiguous()

    @property
    def after(self) -> tuple[torch.Tensor | None, str, float | None]:
        return self.residual, self.activation, self.limit


def down_tile(tokens: int, inter: int, table: str = DEFAULT) -> RowTile:
    """The cut of the down product: whole rows in registers for one token, a pipeline for more."""
    return row_tiles(inter, table).down if tokens == 1 else tiles(table, "moe", "row_tiles", RowTile)["down"]


def _not_chosen_within(problem: Problem) -> str | None:
    return "biases, swiglu_oai, experts elsewhere or runtime.deterministic" if problem.alone else None


def _not_rows(problem: Problem) -> str | None:
    why = _not_chosen_within(problem)
    # Of larger experts the products of a few tokens gain nothing by finding them themselves.
    rows, small = numbers(problem.table, "moe_gemm")["row_tokens"], numbers(problem.table, "moe")["small_expert"]
    if why is None and (problem.tokens > rows or problem.inner > small or problem.routed > MAX_EXPERTS):
        why = f"for up to {rows} tokens and {MAX_EXPERTS} experts of up to {small} inner channels"
    if why is None and not problem.plain:
        why = "for the highest scores of a softmax, without corrections, groups or shared experts"
    return why


def listed(problem: Problem) -> bool:
    """Whether the launch that chooses lists each expert's pairs as well, as it does for tiles of a decode step."""
    some = problem.tokens > ONE_LAUNCH_TOKENS and problem.pairs <= CHUNK
    return not problem.alone and some and not many_pairs(problem.pairs, problem.experts, problem.table)


def _not_lists(problem: Problem) -> str | None:
    why = _not_chosen_within(problem)
    if why is None and not listed(problem):
        each = numbers(problem.table, "moe_gemm")["grouped_pairs"]
        why = f"for more than {ONE_LAUNCH_TOKENS} tokens, up to {CHUNK} pairs and {each} an expert"
    return why


def _not_rings(problem: Problem) -> str | None:
    why = _not_lists(problem)
    if why is None and not problem.rings:
        why = "needs Hopper, a 16-bit type, and channels in whole boxes of 128"
    if why is None and _rings(problem) is None:
        why = f"for tiles of {MAX_ROWS} pairs and up to {MAX_INNER} inner channels"
    return why


def counted(problem: Problem) -> bool:
    """Whether the launch that chooses counts each expert's pairs as well, as it does for tiles of a prompt."""
    many = problem.tokens >= BF16_THIRDS_TOKENS and many_pairs(problem.pairs, problem.experts, problem.table)
    return not problem.alone and many and not problem.by_token


def _not_counted(problem: Problem) -> str | None:
    why = _not_chosen_within(problem)
    if why is None and not counted(problem):
        each = numbers(problem.table, "moe_gemm")["grouped_pairs"]
        why = f"for {BF16_THIRDS_TOKENS} tokens and more, of more than {each} pairs an expert, by their scores"
    if why is None and not problem.groups:
        why = "needs Hopper, a 16-bit type, and channels in whole boxes of 64"
    return why


def _rows_cut(problem: Problem) -> RowsCut:
    down = down_tile(problem.tokens, problem.inner, problem.table)
    return RowsCut(row_tiles(problem.inner, problem.table).up, down)


def _tiles_cut(problem: Problem) -> TilesCut:
    return pair_tiles(problem.pairs, problem.experts, problem.dtype, problem.bulk, problem.table)


def _rings(problem: Problem) -> Rings | None:
    return ring_tiles(problem.inner, _tiles_cut(problem).rows, problem.multiprocessors)


def _rows(operands: Operands, cut: RowsCut) -> torch.Tensor:
    workspace, x, router, gate_up, down, routing, _, norm_weight, eps, offset, *_ = operands
    norm = (norm_weight, eps, offset, routing.renormalize, routing.scale)
    return routed_rows_moe(workspace, x, router, gate_up, down, routing.top_k, *norm, *operands.after, *cut)


def _in_lists(operands: Operands, h: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, Lists]:
    workspace, router, routing = operands.workspace, operands.router, operands.routing
    partials, counts = scored(workspace, h, router, routing.num_shared)
    known = (routing.bias, routing.table, operands.token_ids)
    how = choice(len(router), routing)
    return chosen_in_lists(workspace, partials, counts, *known, rows, routing.scale, how)


def _by_rings(operands: Operands, cut: tuple[int, Rings]) -> torch.Tensor:
    h = operands.normed()
    weights, experts, lists = _in_lists(operands, h, cut[0])
    chosen = (weights, experts, *operands.after)
    return lists_moe(operands.workspace, h, operands.gate_up, operands.down, *chosen, lists, cut[1])


def _by_lists(operands: Operands, cut: TilesCut) -> torch.Tensor:
    h = operands.normed()
    weights, experts, lists = _in_lists(operands, h, cut.rows)
    chosen = (weights, experts, *operands.after)
    return tiles_moe(operands.workspace, h, operands.gate_up, operands.down, *chosen, lists, cut.up, cut.down)


def _counted(operands: Operands, pairs: int) -> torch.Tensor:
    h, workspace, router, routing = operands.normed(), operands.workspace, operands.router, operands.routing
    partials = logit_partials(workspace, h, router)
    how = choice(len(router), routing)
    weights, experts, found = chosen_in_tiles(workspace, partials, routing.bias, pairs, routing.scale, how)
    return grouped_moe(workspace, h, operands.gate_up, operands.down, weights, experts, *operands.after, found)


def _apart(operands: Operands, _: Any = None) -> torch.Tensor:
    workspace, x, router, gate_up, down, routing, token_ids, norm_weight, eps, offset, *_rest = operands
    norm = (norm_weight, eps, offset, operands.deterministic)
    h, weights, experts = moe_route(workspace, x, router, routing, token_ids, *norm)
    last = (*operands.after, routing.num_shared, operands.deterministic, operands.biases)
    return dense.moe_gemm(workspace, h, Dense(gate_up), Dense(down), weights, experts, *last)


DISPATCH: Dispatch[Problem] = Dispatch(
    [
        Variant(
            "rows",
            _not_rows,
            _rows_cut,
            _rows,
            "docs/experiments/2026-11-22-moe-decode.md (moe-choice.jsonl)",
        ),
        Variant(
            "rings",
            _not_rings,
            lambda problem: (_tiles_cut(problem).rows, _rings(problem)),
            _by_rings,
            "docs/experiments/2026-11-22-moe-decode.md (moe-lists.jsonl, moe-shared-first.jsonl)",
        ),
        Variant(
            "lists",
            _not_lists,
            _tiles_cut,
            _by_lists,
            "docs/experiments/2026-11-22-moe-decode.md (moe-lists.jsonl)",
        ),
        Variant(
            "counted",
            _not_counted,
            lambda problem: PAIRS,
            _counted,
            "docs/experiments/2026-11-22-moe-prompts.md (prompt-route.jsonl)",
        ),
        Variant(
            "apart",
            lambda problem: None,
            lambda problem: None,
            _apart,
            "what nothing else takes: the choice, then the products; docs/experiments/2026-11-22-moe-prompts.md",
        ),
    ]
)
