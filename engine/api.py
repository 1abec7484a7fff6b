"""The engine as a library: submit requests, get token events. No torch until a runner is built.

engine = Engine.from_config(EngineConfig(model="/path/to/checkpoint"))
engine.start()
engine.submit(request, sink)        # sink.deliver(events) is called once a step
...
engine.close()
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine import env
from engine.beam.group import BeamGroup, Submission
from engine.beam.search import BeamSearch
from engine.cache.manager import GroupUse, KVManager
from engine.config import HOST_METHODS, EngineConfig
from engine.core import stopping
from engine.core.draft_depth import Acceptance, DraftDepth
from engine.core.loop import EngineLoop
from engine.core.plan import Runner
from engine.core.prefill_policy import choose_prefill_policy
from engine.core.request import Drafter, Request, Sink
from engine.core.scheduler import Scheduler
from engine.parallel.ranks import Lost, open_runner
from engine.speculation.drafters import maker, predicted
from engine.types import (
    MAX_LOGPROBS,
    SEED_BITS,
    ErrorCode,
    FinishReason,
    RequestError,
    RequestInput,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    check_bad_word_ids,
)

if TYPE_CHECKING:
    from engine.structured.grammars import Grammars

_MANY_IDS = 1024


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine from outside. Totals count from the start.

    late_compiles: kernels that were compiled after the engine was ready; more than none is a fault.
    step_counts, step_tokens: steps and their tokens, by bucket of a step's tokens (STEP_TOKENS_BUCKETS, and beyond).
    drafts: lines with drafts that were committed; draft_tokens: their drafts; accepted_tokens: of these, what stood;
    accepted_at: the same by the draft's place in its line.
    groups: blocks of each paged KV group. state_slots: slots of recurrent state; `cached` are checkpoints.
    cache_dtype: "fp8" where the pool holds 8-bit floats, else "auto".
    """

    running: int
    waiting: int
    groups: tuple[GroupUse, ...]
    state_slots: GroupUse
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    late_compiles: int
    step_counts: tuple[int, ...]
    step_tokens: tuple[int, ...]
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    cache_dtype: str = "auto"


@dataclass(slots=True)
class Generation:
    """All that one request gave, for `Engine.generate`."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float = 0.0
    stop_reason: int | None = None
    num_cached: int = 0
    error: str | None = None

    def add(self, event: TokenEvent) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.num_cached = self.num_cached or event.num_cached
        self.cumulative_logprob = event.cumulative_logprob or self.cumulative_logprob
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.stop_reason = event.stop_reason
            self.error = event.error


class _Collector:
    """A sink that gathers whole generations."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.done = threading.Event()
        self.results = {request_id: Generation(request_id) for request_id in request_ids}
        self._open = len(self.results)

    def deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.results[event.request_id].add(event)
            self._open -= event.finish_reason is not None
        if not self._open:
            self.done.set()


class Engine:
    """One model's engine, with its loop on a thread. Methods are safe to call from any thread.

    `on_failure` is called once if the runner fails: by then every request has had its error and `submit` refuses.
    `runner`, `scheduler` and `loop` are for measurements, and for who steps an engine that was not started.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_failure: Callable[[BaseException], None] | None = None,
        drafter: Callable[[], Drafter | None] | None = None,
        draft_tokens: int = 0,
        grammars: Grammars | None = None,
        lost: Lost = lambda: None,
    ) -> None:
        """drafter makes what proposes up to `draft_tokens` tokens a step for one request; None takes the config's.
        grammars makes what holds answers to their constraints; without it a request that has one is refused. lost says
        what of the runner's other processes cannot go on."""
        self._drafts_on_host = drafter is not None or config.speculation.method in HOST_METHODS
        if drafter is None:
            drafter, draft_tokens = maker(config.speculation), config.speculation.most
        self.runner, self.info = runner, runner.info
        self._kv = KVManager(self.info.pool, prefix_cache=config.cache.prefix_cache, max_length=self.info.max_model_len)
        auto = config.speculation.tokens == "auto"
        self._depth = DraftDepth(draft_tokens, runner.drafts_ready, not self._drafts_on_host) if auto else None
        self.scheduler = Scheduler(
            config.scheduler,
            self._kv,
            prefill_policy=choose_prefill_policy(config.scheduler.preference, *self.info.costs),
            checkpoint_interval=config.cache.checkpoint_interval,
            shapes=self.info.mixed,
            draft_tokens=draft_tokens,
            depth=self._depth,
            clock=clock,
        )
        self.loop = EngineLoop(
            runner,
            self.scheduler,
            self._kv,
            overlap=config.runtime.overlap,
            delay_launch=config.runtime.delay_launch,
            clock=clock,
            sleep=sleep,
            on_failure=on_failure,
            matchers=grammars,
        )
        self._grammars = grammars
        self._lost = lost
        self._clock = clock
        self._drafter = drafter
        self._method = config.speculation.method
        self._takes_predictions = self._method in HOST_METHODS
        self._max_waiting = config.scheduler.max_waiting
        held = self._kv.capacity_tokens
        # The last token drawn is never computed, so it needs no place in the pool.
        self.context = self.info.max_model_len if held is None else min(self.info.max_model_len, held + 1)
        self._lock = threading.Lock()
        self._arrivals = itertools.count()
        self._groups: dict[str, BeamGroup] = {}
        self._accepting = True
        self._closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        on_failure: Callable[[BaseException], None] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        launched: env.Launched | None = None,
    ) -> Engine:
        """Build the runner (this imports torch and reads the weights) and an engine over it.

        progress is called with (what is being done, how much is done, how much there is). launched: by what its ranks
        are started on several hosts, of which this is the first; None has all of them here.
        """
        runner, lost = open_runner(config, progress, launched)
        from engine.structured.grammars import Grammars

        grammars = Grammars(config.tokenizer or config.model, runner.info.vocab_size, runner.info.eos_ids)
        return cls(runner, config, on_failure=on_failure, grammars=grammars, lost=lost)

    def start(self) -> Engine:
        if self._thread is not None:
            raise RuntimeError("the engine is started already")
        self._thread = threading.Thread(target=self.loop.run, name="engine-loop", daemon=True)
        self._thread.start()
        return self

    @property
    def failure(self) -> BaseException | None:
        """What the runner died of, or None while the engine is well."""
        return self._lost() or self.loop.failure

    def submit(self, input: RequestInput, sink: Sink) -> None:
        """Queue a request; its events go to `sink`. Raises RequestError when it is refused: then no event comes."""
        self._validate(input)
        params = input.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(SEED_BITS))
            input = msgspec.structs.replace(input, params=params)
        if params.beam_width > 1:
            self._search(input, sink)
            return
        constraint = params.structured_outputs
        if constraint is not None and self._grammars is None:
            raise RequestError("this engine has no tokenizer, which structured_outputs needs: leave it out")
        with self._lock:
            self._check_admission(input.request_id)
            request = self._request(input, sink, next(self._arrivals), self._deadline(params))
            if not self.loop.enter(request):
                raise RequestError(self._refusal(), ErrorCode.UNAVAILABLE)
        if constraint is not None and self._grammars is not None:
            self._grammars.make(input, lambda matcher: self.loop.set_matcher(request, matcher))

    def _check_admission(self, request_id: str) -> None:
        """Raises RequestError where no further request is taken now. Called under the lock."""
        if not self._accepting or self.loop.failure is not None:
            raise RequestError(self._refusal(), ErrorCode.UNAVAILABLE)
        if request_id in self.loop.live or request_id in self._groups:
            raise RequestError(f"a request with the id {request_id!r} is already running")
        waiting = self.loop.num_waiting
        if waiting >= self._max_waiting:
            raise RequestError(
                f"the queue is full: {waiting} requests wait and {self._max_waiting} may; try again later",
                ErrorCode.UNAVAILABLE,
            )

    def _request(self, input: RequestInput, sink: Sink, arrival: int, deadline: float | None) -> Request:
        params = input.params
        constrained = params.structured_outputs is not None
        request = Request(
            input,
            sink,
            self._kv.new_table((params.cache_salt or "").encode()),
            arrival=arrival,
            limit=stopping.length_limit(len(input.prompt_ids), params, self.context),
            stop_ids=stopping.stop_ids(params, self.info.eos_ids),
            eos_ids=() if params.ignore_eos and not constrained else self.info.eos_ids,
            deadline=deadline,
            entered=self._clock(),
            drafter=self._drafter_of(input),
        )
        request.awaits_matcher = constrained
        if self._depth is not None and request.drafter is not None:
            request.acceptance = Acceptance(self._depth.overall)
        return request

    def _drafter_of(self, input: RequestInput) -> Drafter | None:
        """Raises RequestError for a prediction where the engine drafts otherwise."""
        asked = input.params.speculation
        if self._drafter is None or (asked is not None and asked.method == "none"):
            return None
        constrained = input.params.structured_outputs is not None
        if constrained and not self._drafts_on_host:
            return None  # what a device drafts nobody knows in time to say what may stand behind it
        own = self._drafter()
        if asked is None and (own is not None or not constrained):
            return own
        return predicted(() if asked is None else asked.token_ids, len(input.prompt_ids), own)

    def _deadline(self, params: SamplingParams) -> float | None:
        return None if params.timeout_s is None else self._clock() + params.timeout_s

    def _search(self, input: RequestInput, sink: Sink) -> None:
        """Start a beam search; see `engine.beam`. Its beams' requests have its place in the queue."""
        params = input.params
        stop_ids = stopping.stop_ids(params, self.info.eos_ids)
        limit = stopping.length_limit(len(input.prompt_ids), params, self.context) - len(input.prompt_ids)
        search = BeamSearch(
            params.beam_width, limit, stop_ids, params.min_tokens, params.length_penalty, params.early_stopping
        )
        if search.candidates > MAX_LOGPROBS:
            raise RequestError(
                f"beam_width ({params.beam_width}) and the {len(stop_ids)} tokens that end an answer are "
                f"{search.candidates}; at most {MAX_LOGPROBS} are looked at: send a smaller beam_width"
            )
        arrival, deadline = next(self._arrivals), self._deadline(params)

        def enter(inputs: Sequence[RequestInput], group: Sink) -> None:
            for one in inputs:
                if not self.loop.enter(self._request(one, group, arrival, deadline)):
                    raise RequestError(self._refusal(), ErrorCode.UNAVAILABLE)

        def ended() -> None:
            self._groups.pop(input.request_id, None)

        group = BeamGroup(input, sink, search, Submission(enter, self.loop.abort, ended), params.logprobs)
        with self._lock:
            self._check_admission(input.request_id)
            self._groups[input.request_id] = group
            try:
                group.start()
            except RequestError:
                ended()
                raise

    def _refusal(self) -> str:
        if self.failure is not None:
            return f"the engine has failed and takes no new requests: {self.failure}"
        return "the engine is shutting down and takes no new requests"

    def _validate(self, input: RequestInput) -> None:
        prompt, params = input.prompt_ids, input.params
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token")
        if len(prompt) >= self.context:
            model, pool = self.info.max_model_len, self._kv.capacity_tokens
            bound = f"the context holds {model} tokens"
            if pool is not None and pool < model:
                bound += f" and the KV pool {pool}"
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but {bound}, with at least one to generate: at most "
                f"{self.context - 1} can be served"
            )
        if len(input.output_ids) > params.max_tokens:
            raise RequestError(
                f"output_ids holds {len(input.output_ids)} tokens, more than max_tokens ({params.max_tokens})"
            )
        self._check_ids("prompt_ids", prompt)
        for name, ids in (
            ("output_ids", input.output_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
        ):
            if ids:
                self._check_ids(name, ids)
        if params.speculation is not None:
            self._check_ids("speculation.token_ids", params.speculation.token_ids)
            if params.speculation.method == "prediction" and not self._takes_predictions:
                raise RequestError(
                    "speculation: this model takes no predictions of its answers, since its speculation.method is "
                    f"{self._method}; serve it with prediction, ngram or suffix, or leave the prediction out"
                )
        check_bad_word_ids(input.bad_word_ids)
        for word in input.bad_word_ids:
            self._check_ids("bad_word_ids", word)
        if params.allowed_token_ids:
            _check_bans(input, () if params.ignore_eos else self.info.eos_ids)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        if isinstance(ids, array) and len(ids) > _MANY_IDS:
            import numpy as np  # 50 times as fast, and an array comes from a process that has it

            words = np.frombuffer(ids, np.int32)
            low, high = int(words.min()), int(words.max())
        else:
            low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.info.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"{name} holds the token id {wrong}; ids go from 0 to {self.info.vocab_size - 1}")

    def abort(self, request_id: str) -> None:
        """Cancel a request: its blocks are free before the next step is planned. An unknown id is ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            group.abort()
        else:
            self.loop.abort(request_id)

    def reset_prefix_cache(self, done: Callable[[], None] = lambda: None) -> None:
        """Requests that are submitted once `done` was called, on the loop's thread, find nothing of what was computed
        before."""

        def reset() -> None:
            self._kv.forget_prefixes()
            done()

        self.loop.call(reset)

    def stats(self) -> EngineStats:
        counts = self.scheduler.stats
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.loop.num_waiting,
            groups=self._kv.use(),
            cache_dtype="fp8" if self.info.pool.is_fp8 else "auto",
            state_slots=self._kv.slot_use(),
            preemptions=counts.preemptions,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=self.loop.committer.num_generated,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            late_compiles=self.runner.num_late_compiles,
            step_counts=tuple(counts.step_counts),
            step_tokens=tuple(counts.step_tokens),
            drafts=self.loop.committer.num_drafts,
            draft_tokens=self.loop.committer.num_draft_tokens,
            accepted_tokens=self.loop.committer.num_accepted_tokens,
            accepted_at=tuple(self.loop.committer.accepted_at),
        )

    def generate(self, inputs: list[RequestInput]) -> list[Generation]:
        """Run requests to their end and return them in order. Raises RequestError as `submit` does, after the requests
        before the refused one were cancelled."""
        if self._thread is None:
            raise RuntimeError("the engine is not started: call start() first")
        if not inputs:
            return []
        collector = _Collector(input.request_id for input in inputs)
        submitted: list[str] = []
        try:
            for input in inputs:
                self.submit(input, collector)
                submitted.append(input.request_id)
        except RequestError:
            for request_id in submitted:
                self.abort(request_id)
            raise
        collector.done.wait()
        return [collector.results[input.request_id] for input in inputs]

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for those alive to end. False when `timeout` seconds were not enough."""
        with self._lock:
            self._accepting = False
        return self.loop.wait_idle(timeout)

    def close(self) -> None:
        """Cancel what is alive, stop the loop and close the runner. Safe to call twice."""
        with self._lock:
            self._accepting = False
            closed, self._closed = self._closed, True
        self.loop.stop()
        if closed:
            return
        if self._thread is not None:
            self._thread.join()
        else:
            self.loop.run()  # never started: it only ends what was submitted
        if self._grammars is not None:
            self._grammars.close()
        self.runner.close()

    def check_integrity(self) -> None:
        """Account for every block and slot. For tests, while the engine is idle. Raises AssertionError."""
        self._kv.check_integrity()


def _check_bans(input: RequestInput, eos_ids: Iterable[int]) -> None:
    """Raises RequestError when nothing is left to draw of the tokens that a request allows alone."""
    params = input.params
    allowed = set(params.allowed_token_ids)
    allowed.difference_update(word[0] for word in input.bad_word_ids if len(word) == 1)
    if not allowed:
        raise RequestError("allowed_token_ids: bad_words bans every one of them; allow another token")
    if params.min_tokens and allowed <= {*eos_ids, *params.stop_token_ids}:
        raise RequestError(
            f"allowed_token_ids: every one of them ends the request, and min_tokens ({params.min_tokens}) forbids that "
            "at first; allow another token or leave min_tokens out"
        )
