"""The requests behind one beam search: a step of the search is one request of one token for each beam."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.beam.search import Answer, BeamSearch
from engine.core.request import Sink
from engine.types import (
    ErrorCode,
    FinishReason,
    RequestError,
    RequestInput,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    rejection,
)

_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Submission:
    """How a group gives the engine requests and takes them back."""

    enter: Callable[[Sequence[RequestInput], Sink], None]
    abort: Callable[[str], None]
    ended: Callable[[], None]


class BeamGroup:
    """One beam search in the engine: the sink of its beams' requests. Its answers come at its end, one event each.

    A beam's request starts behind the blocks that the prefix tree holds of its beginning, so what beams share is kept
    once, and a step computes what the last block of each lacks.
    """

    def __init__(
        self, input: RequestInput, sink: Sink, search: BeamSearch, submission: Submission, reported: int | None
    ) -> None:
        """reported: how many of the best tokens at each place its events list; None for no log-probabilities."""
        self._input = input
        self._sink = sink
        self._search = search
        self._submission = submission
        self._reported = reported
        self._ids = input.answer_ids or [input.request_id]
        self._lock = threading.Lock()
        self._over = False
        self._cancelled = False
        self._step = 0
        self._open: dict[str, TokenLogprobs | None] = {}
        self._first: TokenEvent | None = None

    def start(self) -> None:
        """Raises RequestError when the engine takes nothing."""
        self._submit(*self._next())

    def abort(self) -> None:
        """Cancel the search. From any thread."""
        with self._lock:
            self._cancelled = True
            running = list(self._open)
        for request_id in running:
            self._submission.abort(request_id)

    def deliver(self, events: list[TokenEvent]) -> None:
        """What a step of the engine gave the beams' requests. Called on the loop's thread."""
        with self._lock:
            if self._over:
                return
            failed = next((event for event in events if event.finish_reason not in _ENDED_WELL), None)
            for event in events:
                self._open[event.request_id] = event.logprobs[-1] if event.logprobs else None
            self._first = self._first or events[0]
            entries = [entry for entry in self._open.values() if entry is not None]
            if failed is None and len(entries) < len(self._open):
                return
            lost = None if failed is None else failed.request_id
            running = [one for one, entry in self._open.items() if entry is None and one != lost]
            if failed is None:
                self._over = self._search.advance(entries)
                if not self._over and self._cancelled:
                    failed = TokenEvent("", [], finish_reason=FinishReason.CANCELLED, error_code=ErrorCode.CANCELLED)
            self._over = self._over or failed is not None
        if failed is not None:
            for request_id in running:
                self._submission.abort(request_id)
            self._finish([msgspec.structs.replace(failed, request_id=one) for one in self._ids])
        elif self._over:
            answers = [*self._search.answers, *self._unfinished()]
            self._finish([self._event(one, answer) for one, answer in zip(self._ids, answers, strict=False)])
        else:
            try:
                self._submit(*self._next())
            except RequestError as error:
                self._over = True
                self._finish([rejection(one, error) for one in self._ids])

    def _next(self) -> tuple[list[RequestInput], list[str]]:
        self._step += 1
        beams, length = self._search.beams, len(self._search.beams[0].tokens) + 1
        params = SamplingParams(
            max_tokens=length,
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            logprobs=self._search.candidates,
            priority=self._input.params.priority,
            timeout_s=self._input.params.timeout_s,
        )
        ids = [f"{self._input.request_id}#{self._step}.{number}" for number in range(len(beams))]
        inputs = [
            RequestInput(request_id=one, prompt_ids=self._input.prompt_ids, params=params, output_ids=beam.tokens)
            for one, beam in zip(ids, beams, strict=True)
        ]
        return inputs, ids

    def _submit(self, inputs: Sequence[RequestInput], ids: Sequence[str]) -> None:
        with self._lock:
            self._open = dict.fromkeys(ids)
        self._submission.enter(inputs, self)

    def _unfinished(self) -> list[Answer]:
        """Where every continuation ended before there were as many answers as beams, none is left; so beams that go on
        fill up what a search that is over lacks."""
        missing = len(self._ids) - len(self._search.answers)
        return [Answer(beam, 0.0, FinishReason.LENGTH) for beam in self._search.beams[: max(0, missing)]]

    def _event(self, request_id: str, answer: Answer) -> TokenEvent:
        first, beam, most = self._first, answer.beam, self._reported
        assert first is not None
        return TokenEvent(
            request_id,
            beam.tokens,
            finish_reason=answer.reason,
            logprobs=None if most is None else [_cut(entry, most + 1) for entry in beam.logprobs],
            cumulative_logprob=beam.cumulative,
            num_cached=first.num_cached,
            waited=first.waited,
        )

    def _finish(self, events: list[TokenEvent]) -> None:
        self._submission.ended()
        self._sink.deliver(events)


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(entry.ids[:count], entry.logprobs[:count], entry.ranks[:count])
