"""The engine's loop: commands in, steps down to the runner, results up, events out.

One iteration:  delay the launch → drain → schedule → launch step N → wait for step N - 1 → start masks of step N →
commit step N - 1 → deliver → insert prefix blocks → draw masked entries of step N

The step in flight is a value that one iteration hands to the next. With overlap off the same code commits step N
itself. With overlap on, a plan is made before the tokens of the step before it are known: lengths advance at launch,
token ids stay on the device, a request whose last token may be drawn already is not launched again, and what is
computed after an end of sequence is dropped at its commit. An entry that may draw only certain tokens is computed
meanwhile, and draws when the tokens before it are known; which ones is found out on other threads while the tokens
before are committed and delivered. A launch is delayed until the step before it is about to end, so that it takes along
who arrived until then.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.cache.manager import KVManager
from engine.core import masking, stopping
from engine.core.commit import NONE_TAKEN, Committer, InFlight
from engine.core.launch_timer import LaunchTimer
from engine.core.masking import StartedMasks
from engine.core.plan import Runner, StepResult
from engine.core.request import Matcher, Matchers, Request, Sink, Status
from engine.core.scheduler import Scheduler
from engine.types import ErrorCode, FinishReason, RequestError, TokenEvent

# Seconds without work before the runner does work that it put off.
IDLE_S = 0.1
# While a launch is delayed: seconds between looks whether the step in flight has ended after all.
POLL_S = 0.001

log = logging.getLogger(__name__)


class EngineLoop:
    """Drives one runner. `enter`, `abort`, `call`, `stop` and `wait_idle` are for any thread; the rest runs on the
    thread that calls `run` (or `iterate`). `live` holds every request that entered and has not ended.

    on_failure is called, on the loop's thread, after the runner failed and every request was given its error.
    matchers does what is asked of all matchers of a step.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        kv: KVManager,
        *,
        overlap: bool = True,
        delay_launch: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_failure: Callable[[BaseException], None] | None = None,
        matchers: Matchers | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.live: dict[str, Request] = {}
        self.failure: BaseException | None = None
        self.committer = Committer(scheduler, kv, self._emit, clock)
        self._runner = runner
        self._overlap = overlap
        self._delays_launch = delay_launch
        self._clock = clock
        self._sleep = sleep
        self._launch_timer = LaunchTimer(clock)
        self._on_failure = on_failure
        self._submitted: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._matched: deque[tuple[Request, Matcher | RequestError]] = deque()
        self._called: deque[Callable[[], None]] = deque()
        self._awaiting_matcher: list[Request] = []
        self._matchers = matchers
        self._num_matched = 0  # requests with a matcher that have not ended
        self._wake = threading.Condition()
        self._stopping = False
        self._deadlines: list[tuple[float, int, int, Request]] = []
        self._out: dict[Sink, list[TokenEvent]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._submitted) + len(self._awaiting_matcher) + len(self.scheduler.waiting)

    def enter(self, request: Request) -> bool:
        """Queue a request, from any thread. False when the loop has ended or is about to: then it takes nothing."""
        with self._wake:
            if self._stopping:
                return False
            self.live[request.id] = request
            self._submitted.append(request)
            self._wake.notify_all()
        return True

    def set_matcher(self, request: Request, matcher: Matcher | RequestError) -> None:
        """A request that waits for its matcher has it, or cannot have one. From any thread."""
        with self._wake:
            self._matched.append((request, matcher))
            self._wake.notify_all()

    def abort(self, request_id: str) -> None:
        """Cancel a request, from any thread. An unknown id is ignored."""
        with self._wake:
            request = self.live.get(request_id)
            if request is not None:
                self._aborted.append(request)
                self._wake.notify_all()

    def call(self, what: Callable[[], None]) -> None:
        """Do something between two steps, on the loop's thread. From any thread; never done once the loop has ended."""
        with self._wake:
            self._called.append(what)
            self._wake.notify_all()

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until no request is alive and every event is delivered; False after `timeout` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not self.live and not self._out, timeout)

    def stop(self) -> None:
        """Let `run` return after its iteration. Requests that are still alive are cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def run(self) -> None:
        """Iterate until `stop`, blocked while there is nothing to do. A failure of the runner ends every request with
        an error, and the loop with them; it is kept in `failure`."""
        inflight: InFlight | None = None
        try:
            while not self._stopping:
                inflight = self.iterate(inflight)
                if inflight is None and not self.scheduler.has_work:
                    self._wait_for_work()
            if inflight is not None:
                inflight.pending.wait()
            self._drain()
            for request in list(self.live.values()):
                self._end(request, FinishReason.CANCELLED, "the engine is shutting down", ErrorCode.UNAVAILABLE)
            self.deliver()
        except Exception as failure:
            log.exception("the engine's loop failed")
            self.fail(failure)

    def _wait_for_work(self) -> None:
        """Wait for something to do. Work that the runner put off is done in pieces, each after a quiet while."""
        more_idle_work = True
        while True:
            with self._wake:
                if self._wake.wait_for(self._has_commands, IDLE_S if more_idle_work else None):
                    return
            more_idle_work = self._runner.idle()

    def _has_commands(self) -> bool:
        return bool(self._submitted or self._matched or self._aborted or self._called or self._stopping)

    def fail(self, failure: BaseException) -> None:
        """Mark the engine dead and give every request an error. Blocks are not accounted for any more: what failed may
        have been the accounting."""
        self.failure = failure
        with self._wake:
            self._stopping = True
        message = f"the engine failed: {type(failure).__name__}: {failure}"
        for request in list(self.live.values()):
            event = TokenEvent(
                request.id, [], finish_reason=FinishReason.ERROR, error=message, error_code=ErrorCode.UNAVAILABLE
            )
            self._emit(request, event)
        self.deliver()
        if self._on_failure is not None:
            self._on_failure(failure)

    def iterate(self, inflight: InFlight | None) -> InFlight | None:
        """One step. Takes the step that is in flight and returns the one that is then."""
        if inflight is not None and self._delays_launch and self.scheduler.has_room:
            self._delay_launch(inflight)
        self._drain()
        launched = self._launch()
        if launched is None and inflight is None and self.scheduler.has_work:
            raise RuntimeError(f"{self.num_waiting} requests wait and none can run: the scheduler is stuck")
        if self._overlap:
            done, inflight = inflight, launched
        else:
            done, inflight = launched, None
            if done is not None:
                self._draw(self._start_masks(done))
        if done is None:
            masks = self._start_masks(inflight)
        else:
            awaited = not done.pending.done
            result = done.pending.wait()
            took = self._launch_timer.ended(seen=awaited)
            taken = self._advance_matchers(done, result)
            masks = self._start_masks(inflight)
            if took is not None:
                self.scheduler.observe_step(done.plan, took)
            self.committer.commit(done, result, taken)
        if masks is not None and not masks.made.done():
            self._hand_out()
        self._draw(masks)
        self._hand_out()
        return inflight

    def _delay_launch(self, inflight: InFlight) -> None:
        """Wait until the step in flight is about to end."""
        left, delayed, done = self._launch_timer.seconds_left(), False, inflight.pending.done
        while left > 0 and not done:
            self._sleep(min(left, POLL_S))
            left, delayed, done = self._launch_timer.seconds_left(), True, inflight.pending.done
        if delayed:
            self._launch_timer.delayed(ran_dry=done)

    def _launch(self) -> InFlight | None:
        planned = self.scheduler.schedule()
        if planned is None:
            return None
        plan, requests = planned
        if self._num_matched:
            masked = [i for i, of in enumerate(requests) if of.matcher is not None and plan.samples[i]]
            plan = replace(plan, masked=masked)
        began = self._clock()
        pending = self._runner.launch(plan)
        self._launch_timer.launched(plan, began)
        if pending.done:
            self.scheduler.observe_step(plan, self._clock() - began)  # by a device that is the host
        return InFlight(plan, requests, pending)

    def _advance_matchers(self, step: InFlight, result: StepResult) -> Mapping[int, int]:
        if self._matchers is None or not step.plan.masked:
            return NONE_TAKEN
        return masking.advance(self._matchers, step, result)

    def _start_masks(self, step: InFlight | None) -> StartedMasks | None:
        if self._matchers is None or step is None or not step.plan.masked:
            return None
        return masking.start(self._matchers, step)

    def _draw(self, masks: StartedMasks | None) -> None:
        """Let a step's masked entries draw. A matcher that cannot go on ends its request alone."""
        if masks is not None:
            for request, error in masks.draw():
                self._end(request, FinishReason.ERROR, error, ErrorCode.INVALID_ARG)

    def _hand_out(self) -> None:
        self.deliver()
        self.committer.insert_prefix_blocks()

    def _drain(self) -> None:
        # Counted first: what is said from here on may be of a request that is submitted meanwhile, and not taken in.
        num_matched, num_aborted = len(self._matched), len(self._aborted)
        while self._submitted:
            self._enter(self._submitted.popleft())
        for _ in range(num_matched):
            self._queue_matched(*self._matched.popleft())
        for _ in range(num_aborted):
            request = self._aborted.popleft()
            if request.status is not Status.FINISHED:
                self._end(request, FinishReason.CANCELLED, None, ErrorCode.CANCELLED)
        while self._called:
            self._called.popleft()()
        deadlines = self._deadlines
        if deadlines:
            now = self._clock()
            while deadlines and (deadlines[0][0] <= now or deadlines[0][3].status is Status.FINISHED):
                request = heapq.heappop(deadlines)[3]
                if request.status is not Status.FINISHED:
                    message = (
                        f"the request ran past its timeout of {request.input.params.timeout_s:g} s "
                        f"with {request.num_output} tokens generated"
                    )
                    self._end(request, FinishReason.ERROR, message, ErrorCode.UNAVAILABLE)

    def _enter(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, id(request), request))
        if request.awaits_matcher:
            self._awaiting_matcher.append(request)
        else:
            self._queue(request)

    def _queue_matched(self, request: Request, matcher: Matcher | RequestError) -> None:
        if request.status is Status.FINISHED:
            return
        if isinstance(matcher, RequestError):
            self._end(request, FinishReason.REJECTED, matcher.message, matcher.code)
            return
        request.matcher = matcher
        if request.drafter is not None:
            request.drafter = matcher.drafting(request.drafter)
        self._num_matched += 1
        self._awaiting_matcher.remove(request)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request)
        # A replayed request may have been at its end already when its earlier life broke off.
        ended = stopping.check(request) if request.num_output else None
        if ended is not None:
            self.committer.end(request, ended[0], stop=ended[1])

    def _end(self, request: Request, reason: FinishReason, error: str | None, code: ErrorCode) -> None:
        if request in self._awaiting_matcher:
            self._awaiting_matcher.remove(request)
            self.scheduler.add(request)  # which it leaves as every other
        self.committer.end(request, reason, error=error, code=code)

    def _emit(self, request: Request, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            del self.live[request.id]
            self._num_matched -= request.matcher is not None
        batch = self._out.get(request.sink)
        if batch is None:
            self._out[request.sink] = [event]
        else:
            batch.append(event)

    def deliver(self) -> None:
        """Hand each sink its events, all of a step at once."""
        if not self._out:
            return
        for sink, events in self._out.items():
            try:
                sink.deliver(events)
            except Exception:
                # Nobody listens any more: what this sink still runs is given up.
                log.exception("a sink failed; its requests are cancelled")
                for request in list(self.live.values()):
                    if request.sink is sink:
                        self.abort(request.id)
        self._out.clear()
        if not self.live:
            with self._wake:
                self._wake.notify_all()
