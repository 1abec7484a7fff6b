"""One request inside the engine: its tokens, four counters, its status. Everything else follows from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from engine.cache.blocks import KVTable
from engine.core.draft_depth import Acceptance
from engine.types import RequestInput, TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.core.plan import Masks


class Status(Enum):
    """WAITING → RUNNING → FINISHED. A preempted request goes back to WAITING; a waiting one can end as well."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sink(Protocol):
    """Where the events of some requests go. Called on the loop's thread, once a step, with that step's events: it must
    hand them on and return."""

    def deliver(self, events: list[TokenEvent]) -> None: ...


class Drafter(Protocol):
    """Proposes tokens for one request. The loop's thread calls it, so what it takes is bounded in time and memory."""

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        """At most `count` tokens that may follow `tokens`: the request's, with what it gave since the last call."""
        ...

    def close(self, given: Sequence[int]) -> None:
        """The request is over, and `given` are the tokens that the model gave."""
        ...


class Matcher(Protocol):
    """Where a request's answer stands in what it must be. The loop's thread calls it, so that what it takes is bounded
    in time.

    count: tokens that the request was given."""

    count: int

    @property
    def ended(self) -> bool:
        """The answer is complete and nothing may follow it."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """It can say what may stand behind tokens that the request was not given yet."""
        ...

    def drafting(self, other: Drafter) -> Drafter:
        """Proposes the tokens that alone may follow, and what `other` does where there are several."""
        ...


class Matchers(Protocol):
    """What matchers of one engine do together: a step's at once, on threads of their own."""

    @property
    def mask_words(self) -> int:
        """Words of a mask: one bit a token."""
        ...

    def advance(self, matchers: Sequence[Matcher], runs: Sequence[Sequence[int]]) -> list[int]:
        """Each request is given a run of tokens: how many of them its matcher took, all or up to the one that completes
        the answer."""
        ...

    def start_masks(self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], masks: Masks) -> Future[None]:
        """Write what each matcher lets through next, and behind it the same behind each of its drafts, to masks
        [n, mask_words] int32: bit v % 32 of word v // 32 says whether it may be token v. `drafts` may be empty. A
        matcher that fails has an error afterwards. Until it is done nothing else is asked of these matchers."""
        ...


_LEGAL = {
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.WAITING, Status.FINISHED),
    Status.FINISHED: (),
}


class Request:
    """Mutable, owned by the loop's thread.

    tokens         prompt, then generated tokens that are known on the host
    num_tokens     len(tokens)
    num_computed   tokens launched: their keys and values are in the cache once the launched steps have run
    num_inflight   drawn tokens that are still on the device; num_tokens + num_inflight is what the row holds
    num_drafted    of these, drafts that may yet be rejected: the row holds that many less at least
    drafter        proposes tokens for it; None when each of its steps gives one
    acceptance     how likely its drafts are accepted, where that says how many there are; num_draft_tokens,
                   num_accepted_tokens: how many were proposed, and accepted
    want_reports   its events say more than their tokens
    matcher        says what its answer may be; None when that is free, or not known yet
    awaits_matcher it waits for its matcher
    num_cached     prompt tokens that the first admission took from the prefix cache
    limit          num_tokens at which it ends for length: max_tokens, or the context is full
    row, kv        its row of the tables (-1 while waiting) and what it holds of the cache
    awaited_prefix key of the last block that it waits for a running request to compute, if any
    started        it was admitted once
    first_event_pending  no event has been given yet
    entered        when the engine took it; scheduled: when it was first admitted. Seconds of the engine's clock
    order          (priority, arrival): the lower runs first and is preempted last
    """

    __slots__ = (
        "acceptance",
        "arrival",
        "awaited_prefix",
        "awaits_matcher",
        "cumulative_logprob",
        "deadline",
        "drafter",
        "entered",
        "eos_ids",
        "first_event_pending",
        "id",
        "input",
        "kv",
        "limit",
        "matcher",
        "min_length",
        "num_accepted_tokens",
        "num_cached",
        "num_computed",
        "num_draft_tokens",
        "num_drafted",
        "num_inflight",
        "num_prompt",
        "num_tokens",
        "order",
        "prompt_logprobs",
        "row",
        "scheduled",
        "sink",
        "started",
        "status",
        "stop_ids",
        "tokens",
        "want_prompt_logprobs",
        "want_reports",
    )

    def __init__(
        self,
        input: RequestInput,
        sink: Sink,
        kv: KVTable,
        *,
        arrival: int,
        limit: int,
        stop_ids: frozenset[int],
        eos_ids: tuple[int, ...] = (),
        deadline: float | None = None,
        entered: float = 0.0,
        drafter: Drafter | None = None,
    ) -> None:
        params = input.params
        self.id = input.request_id
        self.input = input
        self.sink = sink
        self.kv = kv
        self.arrival = arrival
        self.order = (params.priority, arrival)
        self.tokens = array("i", input.prompt_ids)
        self.tokens.extend(input.output_ids)
        self.num_prompt = len(input.prompt_ids)
        self.num_tokens = len(self.tokens)
        self.num_computed = 0
        self.num_inflight = 0
        self.num_drafted = 0
        self.drafter = drafter
        self.acceptance: Acceptance | None = None
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.matcher: Matcher | None = None
        self.awaits_matcher = False
        self.num_cached = 0
        self.limit = limit
        self.min_length = self.num_prompt + params.min_tokens
        self.stop_ids = stop_ids
        self.eos_ids = eos_ids
        self.deadline = deadline
        self.entered = entered
        self.scheduled = entered
        self.row = -1
        self.status = Status.WAITING
        self.started = False
        self.first_event_pending = True
        self.awaited_prefix: bytes | None = None
        self.cumulative_logprob = 0.0
        self.want_reports = params.logprobs is not None or input.want_usage
        self.want_prompt_logprobs = params.prompt_logprobs is not None and not input.output_ids
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * self.num_prompt if self.want_prompt_logprobs else []

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    def move(self, status: Status) -> None:
        """Raises ValueError for an illegal transition: so a request can end only once."""
        if status not in _LEGAL[self.status]:
            raise ValueError(f"request {self.id} cannot go from {self.status.name} to {status.name}")
        self.status = status
