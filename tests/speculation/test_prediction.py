"""What a request predicts of its answer is drafted as long as the answer goes along."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.prediction import Alignment, PredictionDrafter
from engine.types import RequestSpeculation

PROMPT = [1, 2, 3]


def drafts(predicted: list[int], answer: list[int], count: int = 3) -> list[int]:
    drafter = PredictionDrafter(predicted, len(PROMPT), None)
    return list(drafter.propose(array("i", PROMPT + answer), count))


def test_an_answer_that_goes_along_is_drafted_to_its_end() -> None:
    predicted = [10, 11, 12, 13, 14]
    assert drafts(predicted, []) == [10, 11, 12]
    assert drafts(predicted, [10, 11]) == [12, 13, 14]
    assert drafts(predicted, [10, 11, 12, 13]) == [14]
    assert drafts(predicted, predicted) == []


def test_behind_a_change_drafts_begin_where_the_answer_comes_back() -> None:
    predicted = [10, 11, 12, 13, 14, 15]
    assert drafts(predicted, [10, 99]) == [], "nobody knows where it stands"
    assert drafts(predicted, [10, 99, 11]) == [12, 13, 14], "tokens were put in"
    assert drafts(predicted, [10, 99, 12]) == [], "one token may stand anywhere"
    assert drafts(predicted, [10, 99, 12, 13]) == [14, 15], "tokens were replaced"
    assert drafts(predicted, [13, 14]) == [15], "tokens were left out"


def test_of_places_with_equal_tokens_the_next_is_taken() -> None:
    predicted = [5, 6, 7, 5, 6, 8, 5, 6, 9]
    assert drafts(predicted, [5, 6, 7, 0, 5, 6], 1) == [8]
    assert drafts(predicted, [5, 6, 7, 5, 6, 8, 0, 5, 6], 1) == [9]
    assert drafts(predicted, [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6], 1) == [], "it does not go back"


class Other:
    def __init__(self) -> None:
        self.closed: list[int] = []

    def propose(self, tokens: array[int], count: int) -> list[int]:
        return [77] * count

    def close(self, given: list[int]) -> None:
        self.closed = given


def test_another_drafter_takes_over_where_nothing_is_predicted() -> None:
    other = Other()
    drafter = PredictionDrafter([10, 11], len(PROMPT), other)
    assert list(drafter.propose(array("i", PROMPT), 2)) == [10, 11]
    assert list(drafter.propose(array("i", [*PROMPT, 50]), 2)) == [77, 77]
    drafter.close([50])
    assert other.closed == [50]


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_a_predicted_token_counts_once_at_most(predicted: list[int], answer: list[int]) -> None:
    alignment = Alignment(predicted)
    for token in answer:
        alignment.take(token)
    assert alignment.num_matched <= min(len(predicted), len(answer))
    assert list(alignment.following(99)) == predicted[len(predicted) - len(alignment.following(99)) :]
    whole = Alignment(predicted)
    for token in predicted:
        whole.take(token)
    assert whole.num_matched == len(predicted)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"method": "prediction"}, "which needs them"),
        ({"method": "none", "token_ids": [1]}, "go with the method prediction"),
        ({"method": "prediction", "token_ids": [1] * (1 << 18)}, "at most 131072"),
    ],
)
def test_what_a_request_says_is_checked(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=sentence):
        msgspec.convert(fields, RequestSpeculation)
