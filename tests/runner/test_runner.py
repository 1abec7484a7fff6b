"""What a plan's executor promises: tokens of a row depend on that row alone, and a fault is that row's alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.config import RuntimeConfig
from engine.core.plan import StepPlan
from engine.runner import inputs
from engine.runner.runner import DeviceRunner
from engine.types import SamplingParams
from tests.runner.tiny import GREEDY, VOCAB, blocks, generate, make, start, step


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> DeviceRunner:
    return make(tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(8, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=1234567890123456789, max_tokens=64)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_gives_each_row_what_it_gets_alone(runner: DeviceRunner, params: SamplingParams) -> None:
    prompts = [prompt(n, seed=n) for n in (1, 16, 33, 60)]
    alone = [generate(runner, p, 6, params) for p in prompts]
    together = step(
        runner, [(i, 0, len(p)) for i, p in enumerate(prompts)], [start(i, p, params) for i, p in enumerate(prompts)]
    ).tokens
    drawn = [[token] for token in together]
    for n in range(5):
        more = step(runner, [(i, len(p) + n, 1) for i, p in enumerate(prompts)]).tokens
        for row, token in zip(drawn, more, strict=True):
            row.append(token)
    assert drawn == alone
    assert len({tuple(row) for row in drawn}) == 4


def test_a_replayed_request_goes_on_as_it_would_have(runner: DeviceRunner) -> None:
    given = prompt(20)
    whole = generate(runner, given, 8, SAMPLED)
    for told in range(1, 8):
        known = given + whole[:told]
        again = start(2, known, SAMPLED, num_prompt=len(given))
        assert step(runner, [(2, 0, len(known))], [again]).tokens == [whole[told]]


def test_the_next_step_is_launched_before_the_last_has_come_back(runner: DeviceRunner) -> None:
    given = prompt(12)
    alone = generate(runner, given, 5)
    pending = [runner.launch(StepPlan(0, [0], [0], [12], [True], [start(0, given)], [blocks(0)]))]
    pending += [runner.launch(StepPlan(n, [0], [11 + n], [1], [True])) for n in range(1, 5)]
    assert [p.wait().tokens[0] for p in pending] == alone


def test_a_chunk_that_does_not_sample_draws_nothing(runner: DeviceRunner) -> None:
    given = prompt(40)
    alone = generate(runner, given, 1)
    first = runner.launch(StepPlan(0, [1], [0], [25], [False], [start(1, given)], [blocks(1)])).wait()
    assert first.tokens == [-1]
    assert step(runner, [(1, 25, 15)]).tokens == alone


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    runner = make(tmp_path)
    good = prompt(20)
    alone = generate(runner, good, 2)
    with torch.inference_mode():
        runner._decoder.embed.weight.data[5] = float("nan")
    bad = [9, 5, 11]
    result = step(runner, [(0, 0, 3), (1, 0, 20)], [start(0, bad), start(1, good)])
    assert list(result.errors) == [0]
    assert "not finite" in result.errors[0]
    assert result.tokens == [-1, alone[0]]
    later = step(runner, [(0, 3, 1), (1, 20, 1)])
    assert (list(later.errors), later.tokens[1]) == ([0], alone[1])


def test_no_token_left_to_draw_is_a_fault_of_the_row(runner: DeviceRunner) -> None:
    params = replace(GREEDY, allowed_token_ids=(9,))
    result = step(runner, [(0, 0, 2)], [start(0, [8, 9], params, bad_word_ids=((9,),))])
    assert list(result.errors) == [0]


def test_logprobs_are_of_what_the_model_says_before_any_edit(runner: DeviceRunner) -> None:
    given = prompt(20)
    plain = step(runner, [(0, 0, 20)], [start(0, given, replace(GREEDY, logprobs=5))])
    best = plain.tokens[0]
    params = replace(GREEDY, logprobs=5, logit_bias={best: -100.0}, repetition_penalty=3.0)
    edited = step(runner, [(0, 0, 20), (1, 0, 20)], [start(0, given, params), start(1, given)])
    assert edited.tokens[1] == best
    assert edited.tokens[0] != best
    assert list(edited.logprobs) == [0]
    assert edited.logprobs[0][0].ids[0] == edited.tokens[0]
    assert edited.logprobs[0][0].ids[1:] == plain.logprobs[0][0].ids[1:]
    assert edited.logprobs[0][0].logprobs[1:] == pytest.approx(plain.logprobs[0][0].logprobs[1:])
    assert edited.logprobs[0][0].ranks[1:] == [1, 2, 3, 4, 5]


def test_each_entry_gets_as_many_logprobs_as_it_asked_for(runner: DeviceRunner) -> None:
    wanted = (0, 3, None, 2)
    given = [prompt(8, seed=i) for i in range(4)]
    result = step(
        runner,
        [(i, 0, 8) for i in range(4)],
        [start(i, given[i], replace(GREEDY, logprobs=k)) for i, k in enumerate(wanted)],
    )
    assert {i: len(logprobs.ids) for i, (logprobs,) in result.logprobs.items()} == {0: 1, 1: 4, 3: 3}


def test_the_last_layer_computes_no_token_that_nobody_asks_for(tmp_path: Path) -> None:
    """Each entry's last token alone, unless log-probabilities of the prompt are wanted; what is drawn is the same."""
    runner = make(tmp_path, runtime=RuntimeConfig(graphs=False))  # which pad entries
    given = [prompt(n, seed=n) for n in (20, 33)]
    computed: list[int] = []
    runner._decoder.layers[-1].ffn.register_forward_pre_hook(lambda _, args: computed.append(len(args[0])))
    entries = [(0, 0, 20), (1, 0, 33)]
    trimmed = step(runner, entries, [start(i, ids, SAMPLED) for i, ids in enumerate(given)])
    asks = [replace(SAMPLED, prompt_logprobs=1), SAMPLED]
    whole = step(
        runner, entries, [start(i, ids, params) for i, (ids, params) in enumerate(zip(given, asks, strict=True))]
    )
    step(runner, [(0, 20, 1), (1, 33, 1)])
    assert computed == [2, 53, 2]
    assert trimmed.tokens == whole.tokens


def test_changes_that_the_buffer_has_no_room_for_come_all_the_same(
    runner: DeviceRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "CHANGE_WORDS", 24)  # a prompt that starts has more
    assert generate(make(tmp_path), prompt(40), 20, SAMPLED) == generate(runner, prompt(40), 20, SAMPLED)


@pytest.mark.parametrize("chunks", [[30], [1] * 30, [7, 16, 7], [29, 1]])
def test_prompt_logprobs_in_chunks(runner: DeviceRunner, chunks: list[int]) -> None:
    given = prompt(30)
    params = replace(GREEDY, prompt_logprobs=2)
    whole = step(runner, [(0, 0, 30)], [start(0, given, params)]).prompt_logprobs[0]
    assert [entry.ids[0] for entry in whole] == given[1:]
    heard, first = [], 0
    for n, count in enumerate(chunks):
        begin = ([start(1, given, params)], [blocks(1)]) if n == 0 else ([], [])
        plan = StepPlan(n, [1], [first], [count], [first + count == 30], *begin)
        heard += runner.launch(plan).wait().prompt_logprobs.get(0, [])
        first += count
    assert [(e.ids, e.ranks) for e in heard] == [(e.ids, e.ranks) for e in whole]
    for ours, theirs in zip(heard, whole, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_prompt_logprobs_end_with_the_prompt(runner: DeviceRunner) -> None:
    """Tokens that an earlier life generated are no part of it."""
    known = start(0, prompt(12), replace(GREEDY, prompt_logprobs=0), num_prompt=9)
    assert len(step(runner, [(0, 0, 12)], [known]).prompt_logprobs[0]) == 8


def test_penalties_count_what_was_generated_on_the_device(runner: DeviceRunner) -> None:
    params = replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=2.0)
    tokens = generate(runner, prompt(5), 40, params)
    assert len(set(tokens)) > 30
    assert len(set(tokens)) > len(set(generate(runner, prompt(5), 40)))


def test_a_row_forgets_its_former_request(runner: DeviceRunner) -> None:
    given = prompt(10)
    alone = generate(runner, given, 4)
    params = replace(GREEDY, logit_bias={11: 100.0}, logprobs=2, prompt_logprobs=1)
    assert generate(runner, given, 4, params) == [11] * 4
    assert generate(runner, given, 4) == alone
    assert step(runner, [(0, 13, 1)]).logprobs == {}


def test_a_request_without_a_seed_is_refused(runner: DeviceRunner) -> None:
    with pytest.raises(ValueError, match="without a seed"):
        step(runner, [(0, 0, 1)], [start(0, [8], SamplingParams(temperature=1.0))])


def test_the_last_position_of_the_context_draws(runner: DeviceRunner) -> None:
    given = prompt(256)[:240]
    tokens = generate(runner, given, 17)
    assert (len(given) + len(tokens), len(tokens)) == (runner.info.max_model_len + 1, 17)
    known = given + tokens[:16]
    assert step(runner, [(1, 0, 256)], [start(1, known)]).tokens == tokens[16:]
