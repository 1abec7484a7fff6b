"""Edits of logits: each changes what it says and nothing else."""

from __future__ import annotations

import pytest
import torch

from engine.core.plan import RowStart
from engine.sampling.logits import LineEdits, RowEdits, edit
from engine.types import SamplingParams

CPU = torch.device("cpu")
VOCAB = 12
PROMPT = [1, 2, 3]
NEVER = float("-inf")


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
    edit(logits, [LineEdits(1, len(tokens), RowEdits(start, CPU), table)])
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
    assert not RowEdits(start, CPU).touch(len(PROMPT))


def test_a_row_that_has_its_least_tokens_needs_no_edits_any_more() -> None:
    for more, ever in (({}, False), ({"logit_bias": {4: 1.0}}, True), ({"allowed_token_ids": (4,)}, True)):
        edits = RowEdits(RowStart(0, PROMPT, len(PROMPT), SamplingParams(min_tokens=2, max_tokens=5, **more)), CPU)
        assert [edits.touch(len(PROMPT) + generated) for generated in range(4)] == [True, True, ever, ever]
