"""What a step's result means: tokens to requests, events to sinks, ends to requests, full blocks to the tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.cache.manager import KVManager
from engine.config import MAX_DRAFTS
from engine.core import stopping
from engine.core.plan import Draft, Pending, StepPlan, StepResult
from engine.core.request import Request, Status
from engine.core.scheduler import Scheduler
from engine.types import ErrorCode, FinishReason, TokenEvent, TokenLogprobs, Usage

Emit = Callable[[Request, TokenEvent], None]
NONE_TAKEN: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its plan, the request of each entry, and the result to come."""

    plan: StepPlan
    requests: list[Request]
    pending: Pending


class Committer:
    """Applies results in the order of their steps: `commit`, then, when the events have gone out,
    `insert_prefix_blocks`. `emit` gets every event of a request; the last has a finish_reason and comes exactly once,
    because a request can enter FINISHED only once."""

    def __init__(
        self, scheduler: Scheduler, kv: KVManager, emit: Emit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_generated = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_at = [0] * MAX_DRAFTS  # accepted drafts by their place in an entry
        self._scheduler = scheduler
        self._kv = kv
        self._emit = emit
        self._clock = clock
        self._filled: list[tuple[Request, int]] = []  # computed up to the second, at the end of a block or beyond

    def commit(self, step: InFlight, result: StepResult, taken: Mapping[int, int] = NONE_TAKEN) -> None:
        """Give tokens to requests and end those that they end. taken: of entries with drafts and a matcher, how many
        tokens that has taken (`engine.core.masking.advance`)."""
        plan, emit, filled = step.plan, self._emit, self._filled
        size = self._kv.block_size
        drawn, errors = result.tokens, result.errors
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        drafts = plan.drafts
        for i, (request, first, count, samples) in enumerate(
            zip(step.requests, plan.first, plan.count, plan.samples, strict=True)
        ):
            # An entry of a request that ended while the step was in flight: its token is dropped.
            if request.status is Status.FINISHED:
                continue
            if drafts and i in drafts:
                self._commit_drafted(request, i, drafts[i], result, taken.get(i))
                continue
            if samples:
                request.num_inflight -= 1
            if errors and i in errors:
                self.end(request, FinishReason.ERROR, error=errors[i])
                continue
            if request.want_prompt_logprobs and i in prompt_logprobs:
                found = prompt_logprobs[i]
                request.prompt_logprobs[first + 1 : first + 1 + len(found)] = found
            # A plan that counted on drafts which were rejected has too large a `first`; an entry that draws ends at the
            # last known token.
            end = request.num_tokens if samples else first + count
            if samples:
                token = drawn[i]
                request.tokens.append(token)
                request.num_tokens += 1
                self.num_generated += 1
            # A request that gave way and started again since the launch holds other blocks, computed less far.
            if (count > 1 or end % size == 0) and request.status is Status.RUNNING and end <= request.num_computed:
                filled.append((request, end))
            if not samples:
                continue
            ended = None
            if request.matcher is not None or request.num_tokens >= request.limit or token in request.stop_ids:
                ended = stopping.check(request)
            if ended is None and not (request.want_reports or request.first_event_pending):
                emit(request, TokenEvent(request.id, [token]))
                continue
            self._report(request, [token], logprobs.get(i), ended)

    def _commit_drafted(self, request: Request, i: int, draft: Draft, result: StepResult, taken: int | None) -> None:
        """Take an entry's own token and its accepted drafts. What follows a token that ends the request is dropped."""
        request.num_inflight -= 1 + draft.count
        request.num_drafted -= draft.count
        if i in result.errors:
            self.end(request, FinishReason.ERROR, error=result.errors[i])
            return
        run = [result.tokens[i], *result.accepted.get(i, ())]
        self.num_drafts += 1
        self.num_draft_tokens += draft.count
        self.num_accepted_tokens += len(run) - 1
        for place in range(len(run) - 1):
            self.accepted_at[place] += 1
        if request.acceptance is not None:
            request.acceptance.drafted(draft.count, len(run) - 1)
        request.num_draft_tokens += draft.count
        request.num_accepted_tokens += len(run) - 1
        if request.status is Status.RUNNING:
            request.num_computed -= 1 + draft.count - len(run)
        count = stopping.count_until_end(request, run) if taken is None else taken
        request.tokens.extend(run[:count])
        request.num_tokens += count
        ended = stopping.check(request)
        self.num_generated += count
        end, size = request.num_tokens - 1, self._kv.block_size
        if end // size > (end - count) // size and request.status is Status.RUNNING:
            self._filled.append((request, end))
        logprobs = result.logprobs.get(i)
        if ended is None and not (request.want_reports or request.first_event_pending):
            self._emit(request, TokenEvent(request.id, run))
        else:
            self._report(request, run[:count], None if logprobs is None else logprobs[:count], ended)

    def _report(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None, ended: stopping.End | None
    ) -> None:
        """An event that says more than its tokens: the first, the last, one with logprobs or usage."""
        for entry in logprobs or ():
            request.cumulative_logprob += entry.logprobs[0]
        reason, stop = ended or (None, None)
        first, request.first_event_pending = request.first_event_pending, False
        waited = (request.scheduled - request.entered, self._clock() - request.scheduled) if first else None
        if reason is not None:
            self.insert_prefix_blocks()  # before its blocks are let go
            self._scheduler.finish(request)
        self._emit(
            request,
            TokenEvent(
                request.id,
                tokens,
                finish_reason=reason,
                logprobs=logprobs,
                cumulative_logprob=request.cumulative_logprob,
                stop_reason=stop,
                num_cached=request.num_cached if first else 0,
                prompt_logprobs=request.prompt_logprobs if first and request.want_prompt_logprobs else None,
                waited=waited,
                complete=reason is FinishReason.STOP and stopping.completed(request),
                usage=self._usage(request) if request.input.want_usage else None,
            ),
        )

    def _usage(self, request: Request) -> Usage:
        size = self._kv.block_size
        return Usage(
            blocks=-(-(request.num_tokens - 1) // size),  # the last token's keys and values are not computed yet
            cached_blocks=request.num_cached // size,
            draft_tokens=request.num_draft_tokens,
            accepted_tokens=request.num_accepted_tokens,
        )

    def insert_prefix_blocks(self) -> None:
        """Give the full blocks of committed steps to the tree: a thousand of a long prompt, whose first token need not
        wait for that."""
        for request, end in self._filled:
            self._kv.commit(request.kv, request.tokens, end)
        self._filled.clear()

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop: int | None = None,
        error: str | None = None,
        code: ErrorCode = ErrorCode.INTERNAL,
    ) -> None:
        """End a request without a further token."""
        self._scheduler.finish(request)
        self._emit(
            request,
            TokenEvent(
                request.id,
                [],
                finish_reason=reason,
                cumulative_logprob=request.cumulative_logprob,
                stop_reason=stop,
                error=error,
                error_code=code,
                complete=reason is FinishReason.STOP and stopping.completed(request),
            ),
        )
