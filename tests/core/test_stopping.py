"""When a request ends by its tokens."""

from __future__ import annotations

import pytest

from engine.cache.blocks import KVTable
from engine.cache.radix import PrefixTree
from engine.core import stopping
from engine.core.request import Request, Status
from engine.types import FinishReason, RequestInput, SamplingParams, TokenEvent


class Nowhere:
    def deliver(self, events: list[TokenEvent]) -> None:
        raise AssertionError("nothing is delivered here")


def request(output: list[int], *, context: int = 100, eos: tuple[int, ...] = (1,), **params: object) -> Request:
    settings = SamplingParams(**{"max_tokens": 10, **params})
    return Request(
        RequestInput(request_id="r", prompt_ids=[7, 8], output_ids=output, params=settings),
        Nowhere(),
        KVTable(PrefixTree(4).prefix(), 1),
        arrival=0,
        limit=stopping.length_limit(2, settings, context),
        stop_ids=stopping.stop_ids(settings, eos),
    )


@pytest.mark.parametrize(
    ("output", "params", "end"),
    [
        ([5], {}, None),
        ([5, 1], {}, (FinishReason.STOP, None)),
        ([5, 1], {"ignore_eos": True}, None),
        ([5, 9], {"stop_token_ids": (9,)}, (FinishReason.STOP, 9)),
        ([5, 9], {"stop_token_ids": (9,), "ignore_eos": True}, (FinishReason.STOP, 9)),
        ([5, 1], {"stop_token_ids": (1,), "ignore_eos": True}, (FinishReason.STOP, 1)),
        ([5, 1], {"min_tokens": 3}, None),
        ([5, 6, 1], {"min_tokens": 3}, (FinishReason.STOP, None)),
        ([5, 6], {"max_tokens": 2}, (FinishReason.LENGTH, None)),
        ([5, 1], {"max_tokens": 2}, (FinishReason.STOP, None)),
        ([5, 6, 6], {"context": 5}, (FinishReason.LENGTH, None)),
        ([], {"max_tokens": 1}, None),
    ],
)
def test_ends(output: list[int], params: dict[str, object], end: stopping.End | None) -> None:
    assert stopping.check(request(output, **params)) == end  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{}, {"min_tokens": 3}, {"max_tokens": 3}, {"stop_token_ids": (9,)}, {"context": 5}])
@pytest.mark.parametrize("run", [[5, 6, 7], [5, 1, 6], [1, 5, 1, 6], [9, 9], [5, 6, 7, 8, 9], []])
def test_a_run_is_cut_where_one_token_after_the_other_ends_it(run: list[int], params: dict[str, object]) -> None:
    held = [*(count for count in range(1, len(run) + 1) if stopping.check(request([4, *run[:count]], **params)))]  # type: ignore[arg-type]
    assert stopping.count_until_end(request([4], **params), run) == (held[0] if held else len(run))  # type: ignore[arg-type]


def test_a_prompt_that_ends_in_a_stop_token_has_not_stopped() -> None:
    assert stopping.check(request([], eos=(8,))) is None


def test_a_request_ends_once() -> None:
    done = request([])
    done.move(Status.RUNNING)
    done.move(Status.WAITING)
    done.move(Status.FINISHED)
    for status in Status:
        with pytest.raises(ValueError, match="cannot go from FINISHED"):
            done.move(status)
