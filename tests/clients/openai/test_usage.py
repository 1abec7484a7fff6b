"""What a request is told that it cost."""

from __future__ import annotations

from clients.openai.usage import Usage
from clients.openai.wire import Piece


def piece(index: int, tokens: int, cached: int = 0) -> Piece:
    return Piece("", tuple(range(tokens)), num_input=10, num_cached=cached, index=index)


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    usage = Usage(candidates=2)
    for index in (0, 1, 2, 3, 0):  # two prompts with two choices each
        usage.add(piece(index, 3))
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 15)
    assert usage.body()["total_tokens"] == 35


def test_what_one_choice_computed_for_another_was_not_cached_before() -> None:
    usage = Usage(candidates=3)
    usage.add(piece(1, 1, cached=8))  # the second choice speaks first, with what the first one computed
    usage.add(piece(0, 1, cached=0))
    usage.add(piece(2, 1, cached=8))
    assert usage.body()["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_prompt_that_was_cached_is_told_as_such() -> None:
    usage = Usage(candidates=2)
    for index in (1, 0):
        usage.add(piece(index, 1, cached=8))
    assert usage.body()["prompt_tokens_details"] == {"cached_tokens": 8}
