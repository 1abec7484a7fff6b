"""Drafts by n-grams: what followed before, in bounded memory."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.backoff import MAX_BACKOFF
from engine.speculation.ngram import MANY, MAX_ENTRIES, SIZES, NgramDrafter, Ngrams

texts = st.lists(st.integers(0, 3), min_size=1, max_size=200)


def proposed(tokens: list[int], count: int = 4) -> list[int]:
    return list(Ngrams().following(array("i", tokens), count))


def latest(tokens: list[int], count: int) -> list[int]:
    """By definition: behind the last place where the longest n-gram stood, going round where the text ends."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                following = tokens[end:]
                return (following * count)[:count]
    return []


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]) == [5, 6, 7, 8]


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert proposed([1, 2, 3, 4, 9, 9, 3, 4, 8, 1, 2, 3, 4], 1) == [9]


def test_the_later_of_equal_matches_wins() -> None:
    assert proposed([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]


def test_a_text_that_goes_round_is_continued_round() -> None:
    assert proposed([7, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_text_without_repetition_has_no_proposal() -> None:
    assert proposed(list(range(500))) == []
    assert proposed([1]) == []


@given(texts, st.integers(1, 9))
def test_proposals_are_what_the_definition_says(tokens: list[int], count: int) -> None:
    """Few n-grams are there, so none takes another's entry."""
    assert proposed(tokens, count) == latest(tokens, count)


@given(texts, st.lists(st.integers(1, 2 * MANY), max_size=6))
def test_tokens_that_come_bit_by_bit_are_known_like_those_that_came_at_once(tokens: list[int], cuts: list[int]) -> None:
    ngrams, held, at = Ngrams(), array("i", tokens[:1]), 1
    for size in [*cuts, len(tokens)]:
        held.extend(tokens[at : at + size])
        at += size
        ngrams.following(held, 4)
    assert list(ngrams.following(held, 4)) == proposed(tokens)


def test_memory_is_bounded_whatever_the_length() -> None:
    ngrams, draw = Ngrams(), random.Random(0)
    tokens = array("i", [draw.randrange(150_000) for _ in range(300_000)])
    tokens.extend(tokens[-5000:-4000])
    assert ngrams.following(tokens, 3) == tokens[-5000:-4997]
    assert ngrams.entries == MAX_ENTRIES * len(SIZES)


def calls_with_proposals(right: bool, steps: int) -> int:
    """Behind 1, 2 comes what came there before, or always another token."""
    drafter, tokens, count = NgramDrafter(), array("i", [1, 2, 3] * 3 + [1, 2]), 0
    for step in range(steps):
        count += bool(drafter.propose(tokens, 2))
        tokens.extend((3 if right else 4 + step, 1, 2))
    return count


def test_a_drafter_that_is_right_goes_on() -> None:
    assert calls_with_proposals(True, 400) == 400


def test_a_drafter_that_is_always_wrong_rests_longer_and_longer() -> None:
    few, many = calls_with_proposals(False, 400), calls_with_proposals(False, 800)
    assert few < 60
    assert many - few <= 2 + 400 * 3 / MAX_BACKOFF
