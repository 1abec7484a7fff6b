"""Edits of logits: each changes what it says and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.plan import RowStart
from engine.parallel.communicator import ALONE
from engine.parallel.vocabulary import Vocabulary
from engine.sampling.logits import EDIT_IDS, EntryEdits, RowEdits, edit
from engine.types import MAX_ALLOWED_IDS, MAX_BAD_WORD_IDS, SamplingParams

VOCAB = 12
WHOLE = Vocabulary(VOCAB, ALONE)
PROMPT = [1, 2, 3]
NEVER = float("-inf")


def id_buffer() -> torch.Tensor:
    """A row's place for ids, with what an earlier row left there."""
    return torch.full((EDIT_IDS,), 99)


def edited(
    generated: list[int],
    eos_ids: tuple[int, ...] = (),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    **params: object,
) -> torch.Tensor:
    """What is added to the logits of a row that has PROMPT and `generated`, beside a row that asks for nothing."""
    tokens = PROMPT + generated
    start = RowStart(0, PROMPT, len(PROMPT), SamplingParams(**params), eos_ids=eos_ids, bad_word_ids=bad_word_ids)
    logits = torch.arange(2 * VOCAB, dtype=torch.float32).view(2, VOCAB)
    before = logits.clone()
    table = torch.tensor(tokens + [0] * 8, dtype=torch.int32)
    least = max(0, len(tokens) - 2)  # as after drafts, of which none may have stood
    edit(logits, [EntryEdits(1, least, RowEdits(start, id_buffer(), WHOLE), table)], torch.tensor([0, len(tokens)]))
    assert torch.equal(logits[0], before[0])
    return logits[1] - before[1]


def banned(change: torch.Tensor) -> list[int]:
    assert set(change.tolist()) <= {0.0, NEVER}
    return (change == NEVER).nonzero().flatten().tolist()


def test_bias_is_added() -> None:
    change = edited([], logit_bias={4: 1.5, 0: -100.0})
    assert change.tolist() == [-100.0, 0, 0, 0, 1.5, *[0.0] * 7]


def test_allowed_tokens_are_all_that_is_left() -> None:
    assert banned(edited([], allowed_token_ids=(2, 7))) == [i for i in range(VOCAB) if i not in (2, 7)]


def test_bias_applies_to_allowed_tokens() -> None:
    change = edited([], allowed_token_ids=(2, 7), logit_bias={2: 3.0, 5: 50.0})
    assert (change[2], change[7], change[5]) == (3.0, 0.0, NEVER)


@pytest.mark.parametrize(("generated", "ends"), [([], []), ([5], []), ([5, 5], [6, 9, 10])])
def test_min_tokens_keep_a_request_from_ending(generated: list[int], ends: list[int]) -> None:
    change = edited(generated, eos_ids=(9, 10), stop_token_ids=(6,), min_tokens=2, max_tokens=5)
    assert banned(change) == [i for i in (6, 9, 10) if i not in ends]


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert banned(edited([], bad_word_ids=((4,),))) == [4]


@pytest.mark.parametrize(
    ("generated", "last"),
    [([], []), ([5], [8]), ([5, 6], [7, 9]), ([6, 5], [8]), ([5, 6, 0], []), ([0, 5, 6], [7, 9])],
)
def test_bad_words_are_not_completed(generated: list[int], last: list[int]) -> None:
    assert banned(edited(generated, bad_word_ids=((5, 6, 7), (5, 8), (6, 9)))) == last


def test_bad_words_look_at_what_was_generated_only() -> None:
    assert banned(edited([], bad_word_ids=((3, 5), (2, 3, 6)))) == []
    assert banned(edited([4], bad_word_ids=((3, 4, 5),))) == []


def test_a_plain_row_needs_no_edits() -> None:
    start = RowStart(0, PROMPT, 3, SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.2))
    assert not RowEdits(start, id_buffer(), WHOLE).touch(len(PROMPT))


def test_a_row_that_has_its_least_tokens_needs_no_edits_any_more() -> None:
    for more, ever in (({}, False), ({"logit_bias": {4: 1.0}}, True), ({"allowed_token_ids": (4,)}, True)):
        edits = RowEdits(
            RowStart(0, PROMPT, len(PROMPT), SamplingParams(min_tokens=2, max_tokens=5, **more)), id_buffer(), WHOLE
        )
        assert [edits.touch(len(PROMPT) + generated) for generated in range(4)] == [True, True, ever, ever]


TOKENS = st.lists(st.integers(0, 4), max_size=6)


@given(TOKENS, st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=6))
@settings(deadline=None)
def test_the_last_tokens_of_words_that_would_be_complete_are_banned(
    generated: list[int], words: list[list[int]]
) -> None:
    ends = {
        word[-1]
        for word in words
        if len(word) - 1 <= len(generated) and generated[len(generated) - len(word) + 1 :] == word[:-1]
    }
    assert banned(edited(generated, bad_word_ids=tuple(map(tuple, words)))) == sorted(ends)


def test_the_most_that_a_request_may_ask_for_fits_its_place() -> None:
    """Of the sizes that are checked when it comes (engine.types)."""
    words = ((4,) * (MAX_BAD_WORD_IDS - 1), (5,))
    change = edited([], bad_word_ids=words, allowed_token_ids=tuple(range(VOCAB)) * (MAX_ALLOWED_IDS // VOCAB))
    assert banned(change) == [5]
