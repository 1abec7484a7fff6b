"""The requests behind a beam search: one of a beam and step, and one end for all of its answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.beam.group import BeamGroup, Submission
from engine.beam.search import BeamSearch
from engine.core.request import Sink
from engine.types import (
    ErrorCode,
    FinishReason,
    RequestError,
    RequestInput,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)

STOP = 9
LIKELY = TokenLogprobs([1, 1, 2, STOP], [-0.1, -0.1, -0.5, -3.0], [1, 1, 2, 3])


class Rig:
    """Stands where the engine does, and where the answers go."""

    def __init__(self, width: int = 2, limit: int = 3, reported: int | None = None) -> None:
        self.running: list[RequestInput] = []
        self.aborted: list[str] = []
        self.events: list[TokenEvent] = []
        self.ends = 0
        self.refusal: RequestError | None = None
        params = SamplingParams(beam_width=width, temperature=0.0, timeout_s=5.0)
        ids = [f"answer-{number}" for number in range(width)]
        input = RequestInput(request_id=ids[0], prompt_ids=[5, 6], params=params, answer_ids=ids)
        search = BeamSearch(width, limit, frozenset({STOP}))
        self.group = BeamGroup(input, self, search, Submission(self.enter, self.aborted.append, self.end), reported)

    def enter(self, inputs: Sequence[RequestInput], sink: Sink) -> None:
        assert sink is self.group
        if self.refusal is not None:
            raise self.refusal
        self.running = list(inputs)

    def end(self) -> None:
        self.ends += 1

    def deliver(self, events: list[TokenEvent]) -> None:
        self.events += events

    def answer(self, *which: int, entry: TokenLogprobs = LIKELY) -> None:
        """The engine gives some of the running beams their token."""
        chosen = [self.running[i] for i in which or range(len(self.running))]
        self.group.deliver(
            [TokenEvent(one.request_id, [entry.ids[0]], FinishReason.LENGTH, [entry], num_cached=1) for one in chosen]
        )

    def fail(self, which: int, reason: FinishReason = FinishReason.ERROR) -> None:
        event = TokenEvent(self.running[which].request_id, [], reason, error="it failed", error_code=ErrorCode.INTERNAL)
        self.group.deliver([event])


def test_a_step_is_a_request_of_one_token_a_beam() -> None:
    rig = Rig()
    rig.group.start()
    assert [(one.output_ids, one.params.max_tokens) for one in rig.running] == [([], 1)]
    rig.answer()
    assert [(one.output_ids, one.params.max_tokens) for one in rig.running] == [([1], 2), ([2], 2)]
    assert {one.params.timeout_s for one in rig.running} == {5.0}
    first = [one.request_id for one in rig.running]
    rig.answer(1)
    assert [one.request_id for one in rig.running] == first, "the next step waits for all beams"
    rig.answer(0)
    assert [one.output_ids for one in rig.running] == [[1, 1], [1, 2]]


def test_answers_come_together_the_likeliest_first() -> None:
    rig = Rig(reported=0)
    rig.group.start()
    for _ in range(3):
        assert not rig.events
        rig.answer()
    assert [event.token_ids for event in rig.events] == [[1, 1, 1], [1, 1, 2]]
    assert [event.request_id for event in rig.events] == ["answer-0", "answer-1"]
    assert {event.finish_reason for event in rig.events} == {FinishReason.LENGTH}
    assert [len(entry.ids) for entry in rig.events[1].logprobs or ()] == [1, 1, 1]
    assert rig.events[1].cumulative_logprob == pytest.approx(-0.7)
    assert rig.ends == 1


def test_a_beam_that_fails_ends_all_answers() -> None:
    rig = Rig()
    rig.group.start()
    rig.answer()
    rig.fail(1)
    assert rig.aborted == [rig.running[0].request_id]
    assert [(event.request_id, event.error) for event in rig.events] == [
        ("answer-0", "it failed"),
        ("answer-1", "it failed"),
    ]
    rig.fail(0, FinishReason.CANCELLED)
    assert len(rig.events) == 2, "each ends once"


def test_abort_cancels_the_beams_and_then_the_answers() -> None:
    rig = Rig()
    rig.group.start()
    rig.answer()
    rig.group.abort()
    assert rig.aborted == [one.request_id for one in rig.running]
    rig.fail(0, FinishReason.CANCELLED)
    assert {event.finish_reason for event in rig.events} == {FinishReason.CANCELLED}
    assert rig.ends == 1


def test_abort_between_two_steps_is_not_lost() -> None:
    rig = Rig()
    rig.group.start()
    rig.group.abort()
    rig.answer()
    assert {event.finish_reason for event in rig.events} == {FinishReason.CANCELLED}


def test_an_engine_that_takes_no_more_ends_the_answers() -> None:
    rig = Rig()
    rig.group.start()
    rig.refusal = RequestError("the engine is shutting down", ErrorCode.UNAVAILABLE)
    rig.answer()
    assert {event.error for event in rig.events} == {"the engine is shutting down"}
    assert {event.error_code for event in rig.events} == {ErrorCode.UNAVAILABLE}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 0.0, "top_p": 0.5},
        {"stop": ("a",)},
        {"repetition_penalty": 1.1},
        {"allowed_token_ids": (1,)},
    ],
)
def test_what_changes_probabilities_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be combined with beam search"):
        SamplingParams(beam_width=2, **fields)  # type: ignore[arg-type]


def test_a_length_penalty_without_beams_is_refused() -> None:
    with pytest.raises(ValueError, match="length_penalty belongs to beam search"):
        SamplingParams(length_penalty=2.0)
