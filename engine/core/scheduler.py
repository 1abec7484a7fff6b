"""What the next step computes: requests and blocks in, a `StepPlan` out. No phases.

A request has tokens that are known and tokens that are computed; a step closes the gap as far as the budget goes:

    1. running requests one token short (they decode): always, one token each
    2. running requests further behind (chunks of a prompt, or of all tokens after a preemption), in order
    3. waiting requests, in order, as rows and blocks allow
    4. tokens drafted for those of 1, as far as budget and blocks go; where steps are padded, not beside 2 and 3

How many drafts are accepted is known later. Until then counters take all of them, and what needs a certain position (a
copy of recurrent state, a request's last token) waits.

When blocks run out the youngest running request gives way: it loses its blocks and later starts again from all its
tokens, most of which it will find in the prefix tree. Requests that a step already holds never give way in it.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from engine.cache.manager import NO_MATCH, KVManager
from engine.config import SchedulerConfig
from engine.core.draft_depth import DraftDepth
from engine.core.plan import NO_SHAPES, STEP_TOKENS_BUCKETS, Draft, MixedShapes, RowStart, StepPlan
from engine.core.prefill_policy import PrefillPolicy
from engine.core.request import Request, Status
from engine.core.waiting_queue import WaitingQueue, rank

# A request waits for another that is computing its prefix when that saves at least this share of its own work.
WAIT_SHARE = 0.25


@dataclass(slots=True)
class SchedulerStats:
    """Totals from the start. Prompt tokens count once a request; queries and hits are tokens of first admissions that
    were looked up in the prefix tree and found there. Steps are counted, and their tokens added up, by bucket."""

    preemptions: int = 0
    prompt_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BUCKETS) + 1))
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BUCKETS) + 1))


class Scheduler:
    """Owns the rows, the running list and the waiting queue. Not thread-safe: the loop owns it."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        prefill_policy: PrefillPolicy,
        checkpoint_interval: int = 256,
        shapes: MixedShapes = NO_SHAPES,
        draft_tokens: int = 0,
        depth: DraftDepth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """draft_tokens: most tokens drafted in a step for a request that has a drafter; depth says how many of them,
        all when None."""
        self.stats = SchedulerStats()
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by rank
        self._kv = kv
        self._clock = clock
        self._budget = config.token_budget
        self._chunk = config.chunk_size or config.token_budget
        self.mixed_budget = config.mixed_budget
        self._shapes = shapes
        self.prefill_policy = prefill_policy
        self._interval = checkpoint_interval
        self._draft_tokens = draft_tokens
        self._depth = depth
        self._max_rows = config.max_rows
        self._free_rows = list(range(config.max_rows))
        self._step = 0
        self._running_changed = False
        self._preempted = False
        self._blocked: tuple[int, int, int] | None = None
        self._clear_plan()

    @property
    def num_running(self) -> int:
        return self._max_rows - len(self._free_rows)

    @property
    def has_room(self) -> bool:
        """Whether a request that arrives could have a row."""
        return bool(self._free_rows)

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """The request is over: its row and blocks are free for the next plan."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._release(request)
            self._running_changed = True
        request.move(Status.FINISHED)
        if request.drafter is not None:
            request.drafter.close(request.tokens[request.num_prompt :])

    def schedule(self) -> tuple[StepPlan, list[Request]] | None:
        """The next step and the request of each of its entries, or None when nothing can be computed now. Counters of
        the planned requests advance: the caller must launch the plan."""
        if self._running_changed:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
            self._running_changed = False
        self._clear_plan()
        behind = self._plan_decodes()
        decoding = len(self._rows) + sum(self._long_count)
        prefill_budget = self._budget - decoding
        if decoding and (behind or self.waiting):
            prefill_budget = min(
                prefill_budget, self.mixed_budget or self._prefill_tokens(decoding, behind) or prefill_budget
            )
        prefill_budget = self._plan_chunks(behind, prefill_budget)
        # Who was just preempted for lack of blocks does not come back in the same step, unless the step is empty.
        if self.waiting and prefill_budget > 0 and not (self._preempted and self._planned):
            self._admit(prefill_budget)
        if self._drafting:
            self._plan_drafts()
        if not self._planned:
            return None
        self._step += 1
        kv = self._kv
        plan = StepPlan(
            step=self._step,
            rows=self._rows + self._long_rows,
            first=self._first + self._long_first,
            count=[1] * len(self._rows) + self._long_count,
            samples=self._samples + self._long_samples,
            starts=self._starts,
            block_writes=kv.writes,
            state_copies=kv.copies,
            drafts={len(self._rows) + i: draft for i, draft in self._drafts.items()},
            follows=self._depth is None or self._depth.follows(len(self._rows) + len(self._long_rows)),
        )
        kv.writes, kv.copies = [], []
        tokens = len(self._rows) + sum(self._long_count)
        bucket = bisect_left(STEP_TOKENS_BUCKETS, tokens)
        self.stats.step_counts[bucket] += 1
        self.stats.step_tokens[bucket] += tokens
        return plan, self._requests + self._long_requests

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so many seconds on the device."""
        if self._depth is not None:
            self._depth.observe_step(plan, seconds)

    def _prefill_tokens(self, rows: int, behind: list[Request]) -> int | None:
        """Prompt tokens for a step with decoding rows. Of a long queue only as much is counted as reaches the
        threshold."""
        threshold = self.prefill_policy.threshold(rows)
        backlog = 0
        for request in chain(behind, self.waiting):
            if backlog >= threshold:
                break
            backlog += request.num_tokens - request.num_computed
        return self.prefill_policy.prefill_tokens(rows, backlog, self._shapes)

    # Entries of one token come first in a plan, so they are kept apart from longer ones (`_long_…`) while it is made.

    def _clear_plan(self) -> None:
        self._rows: list[int] = []
        self._first: list[int] = []
        self._samples: list[bool] = []
        self._requests: list[Request] = []
        self._long_rows: list[int] = []
        self._long_first: list[int] = []
        self._long_count: list[int] = []
        self._long_samples: list[bool] = []
        self._long_requests: list[Request] = []
        self._starts: list[RowStart] = []
        self._drafting: list[tuple[int, Request]] = []  # with places among the entries of one token
        self._drafts: dict[int, Draft] = {}  # by place among the longer entries
        self._preempted = False

    @property
    def _planned(self) -> bool:
        return bool(self._rows or self._long_rows)

    def _plan_tokens(self, request: Request, count: int) -> None:
        first = request.num_computed
        request.num_computed = end = first + count
        samples = end == request.num_tokens + request.num_inflight
        if samples:
            request.num_inflight += 1
        self._add_entry(request, first, count, samples)

    def _add_entry(self, request: Request, first: int, count: int, samples: bool) -> None:
        if count == 1:
            self._rows.append(request.row)
            self._first.append(first)
            self._samples.append(samples)
            self._requests.append(request)
        else:
            self._long_rows.append(request.row)
            self._long_first.append(first)
            self._long_count.append(count)
            self._long_samples.append(samples)
            self._long_requests.append(request)

    def _plan_decodes(self) -> list[Request]:
        """Plan one token for each running request that is one short; return those further behind."""
        behind: list[Request] = []
        drafting = self._drafting
        rows, firsts, samples, requests = self._rows, self._first, self._samples, self._requests
        kv, running = self._kv, self.running
        interval = self._interval if kv.keeps_state else 0
        i = 0
        while i < len(running):
            request = running[i]
            i += 1
            first = request.num_computed
            known = request.num_tokens + request.num_inflight
            if known - first > 1:
                behind.append(request)
                continue
            if known >= request.limit:
                continue
            if request.num_drafted and interval and first % interval == 0:
                continue  # until it is known whether the state is of that position
            if first >= request.kv.covered_tokens:
                least = first - request.num_drafted
                while request.status is Status.RUNNING and kv.extend(request.kv, least, known) < known:
                    if not self._reclaim_draft_blocks(request):
                        self._preempt(running[-1])
                if request.status is not Status.RUNNING:
                    break
            if interval and (first % interval == 0 or first <= request.num_prompt):
                kv.save_state(request.kv, first)
            request.num_computed = known
            request.num_inflight += 1
            if request.drafter is not None and (request.matcher is None or request.matcher.looks_ahead):
                drafting.append((len(rows), request))
            rows.append(request.row)
            firsts.append(first)
            samples.append(True)
            requests.append(request)
        return [request for request in behind if request.status is Status.RUNNING] if self._preempted else behind

    def _plan_drafts(self) -> None:
        """Give entries whose next token is planned as many drafted ones as their drafters have, and budget and free
        blocks allow."""
        if self._long_rows and self._shapes.rows:
            return  # padded steps hold drafts or prompts
        kv, drafted = self._kv, set()
        spare = self._budget - len(self._rows) - sum(self._long_count)
        counts = [self._draft_tokens] * len(self._drafting)
        if self._depth is not None:
            counts = self._depth.draft_counts(
                len(self._rows), [of for _, r in self._drafting if (of := r.acceptance) is not None]
            )
        for (place, request), most in zip(self._drafting, counts, strict=True):
            known, unsure, held = request.num_computed, request.num_drafted, request.num_inflight - 1
            count = min(most, spare, request.limit - 1 - known)
            if kv.keeps_state:
                # Up to where the next copy of the state is due.
                count = min(count, -known % self._interval)
            tokens: Sequence[int] = ()
            if count > 0 and request.drafter is not None:
                tokens = request.drafter.propose(request.tokens, held + count)
                count = len(tokens) - held
            if count > 0 and known + count > request.kv.covered_tokens:
                count = kv.extend(request.kv, known - 1 - unsure, known + count) - known
            if count <= 0:
                continue
            start = known - unsure
            self._drafts[len(self._long_rows)] = Draft(count, start, tokens[start - request.num_tokens : held + count])
            self._add_entry(request, known - 1, 1 + count, True)
            request.num_computed += count
            request.num_inflight += count
            request.num_drafted += count
            spare -= count
            drafted.add(place)
        if drafted:
            kept = [place for place in range(len(self._rows)) if place not in drafted]
            self._rows, self._first = [self._rows[i] for i in kept], [self._first[i] for i in kept]
            self._samples, self._requests = [self._samples[i] for i in kept], [self._requests[i] for i in kept]

    def _reclaim_draft_blocks(self, needy: Request) -> bool:
        """Whether blocks came free that other requests than `needy` hold for rejected drafts."""
        if not self._draft_tokens:
            return False
        drafted = [other for other in self.running if other.drafter is not None and other is not needy]
        return sum(self._kv.truncate(r.kv, max(r.num_tokens, r.num_computed)) for r in drafted) > 0

    def _plan_chunks(self, behind: list[Request], prefill_budget: int) -> int:
        """Plan chunks of running requests that are far behind. Returns what is left of `prefill_budget`."""
        kv = self._kv
        while behind and prefill_budget > 0:
            request = behind.pop(0)
            first = request.num_computed
            end = self._chunk_end(request, first, prefill_budget)
            covered_tokens = kv.extend(request.kv, first, end)
            while covered_tokens == first and (behind or self._draft_tokens):
                if not self._reclaim_draft_blocks(request):
                    if not behind:
                        break
                    self._preempt(behind.pop())
                covered_tokens = kv.extend(request.kv, first, end)
            if covered_tokens > first:
                if kv.keeps_state:
                    kv.save_state(request.kv, first)
                self._plan_tokens(request, covered_tokens - first)
                prefill_budget -= covered_tokens - first
            elif not self._planned:
                # Nobody else holds blocks that could come free: start again, sharing what the tree holds.
                self._preempt(request)
        return prefill_budget

    def _chunk_end(self, request: Request, first: int, prefill_budget: int) -> int:
        """Where a chunk from `first` should end. With recurrent state it ends on a block, so that the state there can
        be kept: on the last full block of the known tokens, before their rest."""
        end = first + min(request.num_tokens - first, prefill_budget, self._chunk)
        if self._kv.keeps_state:
            size = self._kv.block_size
            aligned = min(end, request.num_tokens - 1) // size * size
            if aligned > first:
                end = aligned
        return end

    def _admit(self, prefill_budget: int) -> None:
        """Plan first chunks of waiting requests, in order, as rows and blocks allow. Sets aside those that a running
        request computes a prefix for; stops at the first that does not fit, so that nobody overtakes it."""
        kv = self._kv
        admitted: list[Request] = []
        for request in self.waiting:
            if prefill_budget <= 0 or not self._free_rows:
                break
            if request.num_inflight:
                continue
            if request.awaited_prefix is not None and kv.is_computing(request.awaited_prefix):
                continue
            if self._blocked == (request.arrival, kv.num_releases, len(self.running)):
                break
            tokens = request.tokens
            if request.want_prompt_logprobs and request.first_event_pending:
                match = NO_MATCH
            else:
                match = kv.match(request.kv, tokens)
                gain, key = kv.awaited(request.kv, tokens, match)
                if gain and gain >= WAIT_SHARE * (len(tokens) - match.num_tokens):
                    request.awaited_prefix = key
                    continue
            request.awaited_prefix = None
            first = match.num_tokens
            end = self._chunk_end(request, first, prefill_budget)
            covered_tokens = kv.admit(request.kv, self._free_rows[0], tokens, match, end, len(self.running))
            if covered_tokens == first:
                self._blocked = (request.arrival, kv.num_releases, len(self.running))
                break
            prefill_budget -= covered_tokens - first
            self._start(request, first)
            self._plan_tokens(request, covered_tokens - first)
            admitted.append(request)
        if admitted:
            self.waiting.take(admitted)

    def _start(self, request: Request, first: int) -> None:
        """Give an admitted request a row; its first `first` tokens are in the cache."""
        request.move(Status.RUNNING)
        request.row = row = heapq.heappop(self._free_rows)
        request.num_computed = first
        insort(self.running, request, key=rank)
        if not request.started:
            request.started = True
            request.scheduled = self._clock()
            request.num_cached = min(first, request.num_prompt)
            self.stats.prompt_tokens += request.num_prompt
            if self._kv.prefix_cache and not request.want_prompt_logprobs:
                self.stats.prefix_query_tokens += request.num_tokens
                self.stats.prefix_hit_tokens += first
        source = request.input
        self._starts.append(
            RowStart(
                row=row,
                token_ids=request.tokens[:],
                num_prompt=request.num_prompt,
                params=source.params,
                eos_ids=() if request.matcher is not None else request.eos_ids,
                bad_word_ids=tuple(map(tuple, source.bad_word_ids)),
                state_slot=request.kv.state_slot,
            )
        )

    def _preempt(self, request: Request) -> None:
        """Back to the queue, in its old place. A token that is still in flight is kept when it arrives."""
        self.running.remove(request)
        self._release(request)
        request.move(Status.WAITING)
        request.num_computed = 0
        self.waiting.add(request)
        self.stats.preemptions += 1
        self._preempted = True

    def _release(self, request: Request) -> None:
        self._kv.release(request.kv)
        heapq.heappush(self._free_rows, request.row)
        request.row = -1
