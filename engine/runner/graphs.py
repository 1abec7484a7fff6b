"""CUDA graphs of the steps that are short on the GPU: decode steps, one request's prompt, a few beside decode entries.
If asked for, also of steps up to a whole budget, which a GPU may take less time for than the host to launch them.

A graph is made for a shape, and a step is padded up to the next shape there is: decode entries by dummy entries of one
token, a prompt by one dummy entry that holds the tokens left over. Dummy entries belong to the reserved row, whose
blocks are the reserved block 0. What varies between replays (lengths, ids, tables, drafts) is read from the device.

A step with drafts is entries of one token and entries of up to 1 + k, behind which dummy entries of up to 1 + k take
what is left; it draws behind every token. It is padded only without prompts: the scheduler drafts for no such step.

Where ranks draw from candidates, steps that draw from whole logits have graphs of their own, which are made ahead once
there was one.

Short prompts and one entry have a second graph, for little in the cache: their attention goes by that bound. Layers
over latents, and 8-bit caches, want to know how many tokens the longer entries have in the cache at most: all their
steps have a second graph.

A shape's first step runs eagerly, which compiles what it needs, and is captured after, with a plain draw. Steps with
constraints, penalties or biases draw once more from the logits that it leaves. What drafts on the device follows in a
graph of its own. A few shapes are made at start, the rest when the engine is idle, or when a step needs one.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from engine.core.plan import NO_SHAPES, MixedShapes, StepPlan, draft_depths
from engine.runner.inputs import BUDGET_ENTRIES, MULTI_TOKEN_ENTRIES, StepShape
from engine.runner.pending import ComputedStep
from engine.sampling.sampler import Drawn
from kernels.linear.waves import filled
from kernels.thresholds import SHORT_CONTEXT

log = logging.getLogger(__name__)

# Entries of a decode step: dense, because a padded entry costs its share of the step.
DECODE_ENTRIES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))
# Tokens of a lone prompt. Its launches one by one take the host 20 to 25 ms: as long as the GPU takes for 1,500 tokens,
# and each of several ranks for that many times as many. Tokens that fill a shape up cost as much as others.
PROMPT_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048)
PROMPT_TOKENS_OF_RANKS = (*range(2304, 4096, 256), *range(4096, 8192 + 1, 512))
PROMPT_TOKENS_A_RANK = 2048
# Decode entries that share a step with chunks of prompts, and all tokens of such a step.
MIXED_ENTRIES = (8, 16, 32, 64, 128, 256, 512)
MIXED_TOKENS = (128, 256, 384, 512, 640, 768, 1024, 1088, 1152, 1280, 1536, 1792, 2176)
# Tokens of the first step beyond those, and how far apart larger ones are at most. The largest holds a whole budget.
FIRST_BUDGET_TOKENS, BUDGET_TOKENS_APART = 3072, 2048
# Of such a step: what a chunk and what any entry's context hold at most, for kernels that are launched for as much.
BUDGET_QUERY, BUDGET_CONTEXT = 2048, 4096
# The largest budget: what dummy entries alone can hold.
MAX_BUDGET = (BUDGET_ENTRIES - 4) * BUDGET_QUERY
# What longer entries may have in the cache before a step whose graph has a bound on it, and the tokens from which on a
# prompt needs none.
BOUNDED_PAST, SHORT_PROMPT = 2048, 256
# What a prompt of 1,024 tokens takes beside rows: made before others, behind what the prefill policy fills
# (`core.prefill_policy`).
COMMON_TOKENS = (1152, 1088)
# Of MIXED_TOKENS, what the prefill policy may fill: the one that it takes with experts, and how far from the best a
# smaller one may be, in parts of the time. With 8 billion weights, beside 64 rows: 19.6 µs a token in 1,024, 20.9 in
# 1,536.
WAVE_CANDIDATES, WAVE_ALIGNED_WITH_EXPERTS, WAVE_TOLERANCE = (1024, 1152, 1280, 1536, 1792), 1536, 0.025
# Entries with drafts. Beside them stand MIXED_ENTRIES.
DRAFTED_ENTRIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Made before the engine is ready.
FIRST_ENTRIES = (1, 2, 4, 8)
FIRST_TOKENS = (128,)


T = TypeVar("T")
Compute = Callable[[StepShape], ComputedStep]
Replay = Callable[[], ComputedStep]
Capture = Callable[[Compute, StepShape], Replay]


def mixed_shapes(max_rows: int, max_tokens: int, wave_aligned_tokens: int = WAVE_ALIGNED_WITH_EXPERTS) -> MixedShapes:
    """What steps with chunks of prompts are padded to, in an engine of these limits."""
    if max_rows == 1:
        return NO_SHAPES
    tokens = tuple(n for n in MIXED_TOKENS if n <= max_tokens)
    return MixedShapes(_up_to(max_rows, MIXED_ENTRIES), tokens, MULTI_TOKEN_ENTRIES - 1, wave_aligned_tokens)


def find_wave_aligned_tokens(widest: int, programs: int) -> int:
    """Tokens of the mixed step to fill, where the tiles of a product with `widest` gated outputs fill whole waves of
    `programs` multiprocessors: the fewest that leave nearly as little of them idle as any. With 0 outputs, as with
    experts, WAVE_ALIGNED_WITH_EXPERTS."""
    if not widest:
        return WAVE_ALIGNED_WITH_EXPERTS
    part = {tokens: filled(tokens, widest, programs) for tokens in WAVE_CANDIDATES}
    return next(tokens for tokens in WAVE_CANDIDATES if part[tokens] >= (1 - WAVE_TOLERANCE) * max(part.values()))


def longest_prompt(ranks: int, sliced_context: bool) -> int:
    """Tokens of the largest step of a lone prompt that has a graph. With sliced context a graph takes long chunks the
    slow way (`engine.parallel.context`)."""
    return PROMPT_TOKENS_A_RANK * (1 if sliced_context else ranks)


def padding(rows: int) -> int:
    """Dummy tokens that a whole budget beside up to `rows` decode entries is padded by at most: these entries are more
    than half of the next shape's."""
    return max(MIXED_ENTRIES[0], rows // 2) + BUDGET_ENTRIES


def budget_shapes(rows: int, budget: int) -> MixedShapes:
    """What steps beyond MIXED_TOKENS, up to a whole budget, are padded to beside up to `rows` decode entries."""
    sizes = (FIRST_BUDGET_TOKENS, *range(2 * BUDGET_TOKENS_APART, budget, BUDGET_TOKENS_APART))
    tokens = (*(n for n in sizes if n < budget), budget + padding(rows))
    return MixedShapes((rows,), tokens, BUDGET_ENTRIES - 1)


def _up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes below `most` and itself, or all of them where it is beyond the largest."""
    last = min(most, sizes[-1])
    return (*(n for n in sizes if n < last), last)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which this tensor does not keep from others: graphs of all shapes hold their logits there."""
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


class CudaCapture:
    """Turns a computation and its plain draw into a graph. Graphs share their memory: one step runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, compute: Compute, shape: StepShape) -> Replay:
        def work() -> tuple[ComputedStep, Drawn]:
            computed = compute(shape)
            return computed, computed.draw()

        graph, (outcome, drawn) = self._captured(work)
        decoded = outcome.decoded
        advance_states, follow = map(self._behind, (decoded.advance_states, decoded.follow))
        decoded = replace(decoded, advance_states=advance_states, follow=follow)
        outcome = ComputedStep(decoded, unowned(outcome.logits), lambda: drawn)

        def replay() -> ComputedStep:
            graph.replay()
            return outcome

        return replay

    def _behind(self, work: Callable[[], None] | None) -> Callable[[], None] | None:
        """A graph of its own: it is not replayed with every step."""
        return None if work is None else self._captured(work)[0].replay

    def _captured(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache each time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outcome = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph, outcome


class StepGraphs:
    """Graphs by shape. `max_rows` and `max_tokens` bound a step, `max_context` a request.

    compute runs a staged step. capture makes it a graph; on the GPU that is `CudaCapture`. bounded: whether layers gain
    from a bound on the cached tokens of longer entries. wave_aligned_tokens: what the prefill policy fills.
    max_prompt_tokens: `longest_prompt`. budget_steps: whether steps of several prompts have graphs up to max_tokens;
    long_chunks: also of chunks and behind contexts of any length.
    """

    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        max_rows: int,
        max_tokens: int,
        max_context: int,
        bounded: bool = False,
        wave_aligned_tokens: int = WAVE_ALIGNED_WITH_EXPERTS,
        max_drafts: int = 0,
        max_prompt_tokens: int = PROMPT_TOKENS[-1],
        budget_steps: bool = False,
        long_chunks: bool = False,
    ) -> None:
        self._depths = draft_depths(max_drafts)
        self._drafted = _up_to(max_rows, DRAFTED_ENTRIES)
        self._beside = (0, *_up_to(max_rows, MIXED_ENTRIES)) if max_rows > 1 else (0,)
        # A shape holds no more tokens than are staged.
        self._max_tokens = max_tokens
        self._long_chunks = long_chunks and max_context >= BUDGET_CONTEXT
        self._bounded = bounded
        self._compute = compute
        self._capture = capture
        self._max_context = max_context
        self._entries = _up_to(max_rows, DECODE_ENTRIES)
        longest = min(max_tokens, max_context, max_prompt_tokens) if max_rows > 1 else 0
        self._tokens = [n for n in (*PROMPT_TOKENS, *PROMPT_TOKENS_OF_RANKS) if n <= longest]
        self.mixed_shapes = mixed_shapes(max_rows, min(max_tokens, max_context), wave_aligned_tokens)
        beyond = budget_steps and max_tokens > MIXED_TOKENS[-1]
        self._budgets = [budget_shapes(n, max_tokens) for n in self.mixed_shapes.rows] if beyond else []
        self._replays: dict[StepShape, Replay] = {}
        self._failed = False
        self._saw_whole_logits = False  # whether there was a step that draws from whole logits

    def fit(self, plan: StepPlan, whole_logits: bool = False) -> StepShape | None:
        """The shape to pad the plan to, or None when no graph is made for its kind of step."""
        shape = self._fit(plan)
        if shape is None or not whole_logits:
            return shape
        self._saw_whole_logits = True
        return replace(shape, whole_logits=True)

    def _fit(self, plan: StepPlan) -> StepShape | None:
        entries, tokens = len(plan.rows), plan.num_tokens
        if self._failed:
            return None
        if tokens == entries:
            at = bisect_left(self._entries, entries)
            return self.decode(self._entries[at], plan.first[0] + 1) if at < len(self._entries) else None
        if plan.drafts:
            return self._fit_drafts(plan)
        past = sum(first for first, count in zip(plan.first, plan.count, strict=True) if count > 1)
        if entries == 1:
            at = bisect_left(self._tokens, tokens)
            return self.prompt(self._tokens[at], past) if at < len(self._tokens) else None
        singles = plan.count.count(1)
        mixed = self.mixed_shapes.fit(singles, tokens - singles, entries - singles)
        return self._fit_budget(plan, singles, past) if mixed is None else self.mixed(*mixed, past)

    def decode(self, entries: int, context: int | None = None) -> StepShape:
        """context: what the first entry has with the step's token; None for as much as there may be."""
        near = entries == 1 and context is not None and context <= SHORT_CONTEXT
        longest = min(self._max_context, SHORT_CONTEXT) if near else self._max_context
        return StepShape(entries, entries, num_single=entries, max_query=1, max_context=longest)

    def prompt(self, tokens: int, past: int = 0) -> StepShape:
        """past: what the entries of several tokens have in the cache before the step."""
        near = tokens < SHORT_PROMPT and past <= BOUNDED_PAST
        longest = min(self._max_context, BOUNDED_PAST + tokens) if near else self._max_context
        return self._with_total_context(StepShape(2, tokens, num_single=0, max_query=tokens, max_context=longest), past)

    def mixed(self, entries: int, tokens: int, past: int = 0) -> StepShape:
        shape = StepShape(
            entries + MULTI_TOKEN_ENTRIES, tokens, num_single=entries, max_query=tokens, max_context=self._max_context
        )
        return self._with_total_context(shape, past)

    def _fit_budget(self, plan: StepPlan, singles: int, past: int) -> StepShape | None:
        """Without a bound on all contexts together latents would go the slow way. Two entries are left for what fills
        the shape up."""
        chunks = len(plan.rows) - singles
        found = (shapes.fit(singles, plan.num_tokens - singles, chunks) for shapes in self._budgets)
        fit = next(filter(None, found), None)
        if fit is None or chunks > BUDGET_ENTRIES - 2 or (self._bounded and past > BOUNDED_PAST):
            return None
        held = max(map(sum, zip(plan.first, plan.count, strict=True)))
        near = max(plan.count) <= BUDGET_QUERY and held <= BUDGET_CONTEXT
        return self.budget(*fit, near) if near or self._long_chunks else None

    def budget(self, entries: int, tokens: int, near: bool) -> StepShape:
        """near: of chunks up to BUDGET_QUERY, with no context above BUDGET_CONTEXT."""
        longest = min(self._max_context, BUDGET_CONTEXT) if near else self._max_context
        query = BUDGET_QUERY if near else tokens
        return self._with_total_context(StepShape(entries + BUDGET_ENTRIES, tokens, entries, query, longest), 0)

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        """Whether there is a graph of such a step, or none is ever made."""
        if self._failed:
            return True
        shape = self._padded_drafts(singles, entries, depth)
        return shape is not None and shape in self._replays

    def _fit_drafts(self, plan: StepPlan) -> StepShape | None:
        deepest = max(draft.count for draft in plan.drafts.values())
        singles, entries = len(plan.rows) - len(plan.drafts), len(plan.drafts)
        return self._padded_drafts(singles, entries, deepest) if plan.count.count(1) == singles else None

    def _padded_drafts(self, singles: int, entries: int, deepest: int) -> StepShape | None:
        at = bisect_left(self._beside, singles), bisect_left(self._drafted, entries), bisect_left(self._depths, deepest)
        if at[0] == len(self._beside) or at[1] == len(self._drafted) or at[2] == len(self._depths):
            return None
        sizes = self._beside[at[0]], self._drafted[at[1]], self._depths[at[2]]
        shape = StepShape.drafted(*sizes, self._max_context)
        return shape if shape.tokens <= self._max_tokens else None

    @property
    def _drafting(self) -> list[StepShape]:
        """Shapes of steps with drafts, those first in which all entries have the most."""
        beside = (
            (n, entries, depth) for n in self._beside for depth in reversed(self._depths) for entries in self._drafted
        )
        sizes = (size for size in beside if size[0] + size[1] <= 2 * self._entries[-1])
        shapes = [StepShape.drafted(*size, self._max_context) for size in sizes]
        return [shape for shape in shapes if shape.tokens <= self._max_tokens]

    def _with_total_context(self, shape: StepShape, past: int) -> StepShape:
        """Entries past num_single take all tokens that are left, dummy entries among them, and have `past` before
        those."""
        if not self._bounded or past > BOUNDED_PAST:
            return shape
        return replace(shape, max_total_context=shape.tokens - shape.num_single + BOUNDED_PAST)

    def run(self, shape: StepShape) -> ComputedStep:
        """Run the staged step of that shape: its outputs stay valid until the next step runs."""
        replay = self._replays.get(shape)
        if replay is not None:
            return replay()
        outcome = self._compute(shape)
        # Ahead of its capture, which must find its kernels compiled. Who draws otherwise draws once more.
        drawn = outcome.draw()
        outcome = replace(outcome, draw=lambda: drawn)
        if outcome.decoded.follow is not None:
            outcome.decoded.follow()  # done again it changes nothing
        try:
            self._replays[shape] = self._capture(self._compute, shape)
        except RuntimeError as problem:
            # A model that needs the host within a step cannot be captured; it still runs.
            log.warning("graphs are off: a step of %d tokens could not be captured: %s", shape.tokens, problem)
            self._failed = True
        return outcome

    @property
    def _decodes(self) -> list[StepShape]:
        """Shapes of decode steps, each once."""
        return list(dict.fromkeys((self.decode(1, 1), *(self.decode(n) for n in self._entries))))

    @property
    def first_shapes(self) -> list[StepShape]:
        """Shapes to make before the first request."""
        shapes = [shape for shape in self._decodes if shape.entries in FIRST_ENTRIES]
        shapes += [self.prompt(n) for n in self._tokens if n in FIRST_TOKENS]
        if self._depths:
            entries = (n for n in self._drafted if n in FIRST_ENTRIES)
            shapes += [StepShape.drafted(0, n, self._depths[-1], self._max_context) for n in entries]
        return shapes

    @property
    def next_shape(self) -> StepShape | None:
        """The next shape that is worth making ahead of its use."""
        if self._failed:
            return None
        held = self.mixed_shapes
        mixed = [(n, tokens) for n in held.rows for tokens in held.tokens if tokens > n + MULTI_TOKEN_ENTRIES]
        drafting = self._drafting
        # Requests whose last tokens come stand beside those that draft.
        shapes = [*self._decodes, *(shape for shape in drafting if shape.num_single <= MIXED_ENTRIES[0])]
        common = (held.wave_aligned_tokens, *COMMON_TOKENS)
        shapes += [self.mixed(n, tokens) for size in common for n, tokens in mixed if tokens == size]
        budgets = [(n, tokens) for of in self._budgets for n in of.rows for tokens in reversed(of.tokens)]
        shapes += [self.budget(n, tokens, True) for n, tokens in budgets]
        shapes += [self.prompt(n) for n in self._tokens] + [self.mixed(n, tokens) for n, tokens in mixed]
        shapes += [self.prompt(n, BOUNDED_PAST + 1) for n in self._tokens]
        if self._bounded:
            shapes += [self.mixed(n, tokens, BOUNDED_PAST + 1) for n, tokens in mixed]
        shapes += [self.budget(n, tokens, False) for n, tokens in budgets if self._long_chunks]
        shapes += drafting
        if self._saw_whole_logits:
            shapes += [replace(shape, whole_logits=True) for shape in shapes]
        return next((shape for shape in shapes if shape not in self._replays), None)
