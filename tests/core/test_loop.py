"""The loop: overlap, cancellation, errors, deadlines, replay, delivery."""

from __future__ import annotations

import pytest

from engine.types import ErrorCode, FinishReason, TokenEvent
from tests.core.harness import Harness, make_config, make_request
from tests.core.scripted_runner import EOS, ScriptedRunner, pool

PROMPT = [5, 6, 7, 8, 9]


def launched_tokens(harness: Harness) -> int:
    return sum(plan.num_tokens for plan in harness.runner.plans)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_token_is_not_computed(overlap: bool) -> None:
    """max_tokens is known before the tokens are: with overlap, too, no step is wasted on a request that is done."""
    harness = Harness(ScriptedRunner(pool()), make_config(overlap=overlap))
    harness.submit("a", PROMPT, max_tokens=4)
    harness.run()
    assert harness.tokens("a") == harness.expected(PROMPT, 4)
    assert launched_tokens(harness) == len(PROMPT) + 3


@pytest.mark.parametrize(("overlap", "wasted"), [(True, 1), (False, 0)])
def test_a_token_computed_after_the_end_of_sequence_is_dropped(overlap: bool, wasted: int) -> None:
    harness = Harness(ScriptedRunner(pool(), vocab_size=10), make_config(overlap=overlap))
    wanted = harness.expected(PROMPT, 200)
    wanted = wanted[: wanted.index(EOS) + 1]
    harness.submit("a", PROMPT, max_tokens=200, ignore_eos=False)
    harness.run()
    assert harness.tokens("a") == wanted
    assert harness.reason("a") is FinishReason.STOP
    assert launched_tokens(harness) == len(PROMPT) + len(wanted) - 1 + wasted


def test_overlap_launches_a_step_before_the_tokens_of_the_last_are_known() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(overlap=True))
    harness.submit("a", PROMPT)
    harness.step(2)
    assert len(harness.runner.plans) == 2
    assert len(harness.tokens("a")) == 1


def test_a_step_that_is_overtaken_by_its_request_starting_again_commits_nothing() -> None:
    """A prompt finds no block in its window, gives way, and starts again in the same plan, while its last chunk is on
    the way: that one reached further than the blocks that the request holds by then are computed."""
    harness = Harness(ScriptedRunner(pool(60, window=4, window_blocks=4)), make_config(max_rows=2, chunk_size=1))
    harness.submit("long", [30] * 7, max_tokens=2)
    harness.submit("short", [31], max_tokens=1)
    harness.step(4)
    for name in ("one", "two"):
        harness.submit(name, [2, 3, 4, 5, 6], max_tokens=1)
    harness.run()
    assert harness.engine.stats().preemptions > 0
    for name in ("one", "two"):
        assert harness.tokens(name) == harness.expected([2, 3, 4, 5, 6], 1)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_first_token_is_delivered_before_its_prompts_blocks_enter_the_tree(overlap: bool) -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(overlap=overlap))
    kv = harness.loop.kv
    prompt = PROMPT * 8
    cached: list[int] = []

    class Looks:
        def deliver(self, events: list[TokenEvent]) -> None:
            cached.append(kv.match(kv.new_table(), prompt).num_tokens)

    harness.engine.submit(make_request("a", prompt, max_tokens=2), Looks())
    harness.run()
    assert cached[0] == 0
    assert cached[1] == 36


def test_cancellation_frees_blocks_before_the_next_step_is_planned() -> None:
    harness = Harness(ScriptedRunner(pool()))
    harness.submit("a", PROMPT, max_tokens=100)
    harness.submit("b", PROMPT[::-1], max_tokens=100)
    harness.step(3)
    before = harness.engine.stats().groups[0].used
    harness.engine.abort("a")
    harness.step()
    assert harness.reason("a") is FinishReason.CANCELLED
    assert harness.engine.stats().groups[0].used < before
    assert harness.runner.plans[-1].rows == [1]
    harness.engine.abort("b")
    harness.run()
    assert harness.engine.stats().groups[0].used == 0


def test_an_unknown_or_finished_id_can_be_aborted() -> None:
    harness = Harness(ScriptedRunner(pool()))
    harness.submit("a", PROMPT)
    harness.engine.abort("z")
    harness.run()
    harness.engine.abort("a")
    harness.submit("b", PROMPT)
    harness.run()
    assert harness.reason("a") is FinishReason.LENGTH
    assert harness.reason("b") is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [True, False])
def test_a_row_that_fails_ends_alone(overlap: bool) -> None:
    runner = ScriptedRunner(pool(), fail_row=lambda tokens: "logits are not finite" if 33 in tokens[:1] else None)
    harness = Harness(runner, make_config(overlap=overlap))
    harness.submit("good", PROMPT)
    harness.submit("bad", [33, 4, 5])
    harness.run()
    assert harness.tokens("good") == harness.expected(PROMPT)
    assert harness.reason("bad") is FinishReason.ERROR
    assert harness.end("bad").error == "logits are not finite"
    assert harness.tokens("bad") == []


def test_a_deadline_ends_a_request_with_the_numbers() -> None:
    harness = Harness(ScriptedRunner(pool()))
    harness.submit("slow", PROMPT, max_tokens=1000, timeout_s=2.0)
    harness.submit("other", PROMPT, max_tokens=20)
    harness.step(4)
    harness.now = 2.5
    harness.run()
    end = harness.end("slow")
    assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
    assert end.error == "the request ran past its timeout of 2 s with 3 tokens generated"
    assert harness.tokens("slow") == harness.expected(PROMPT, 3)
    assert harness.reason("other") is FinishReason.LENGTH


def test_a_deadline_holds_in_the_queue_too() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(max_rows=1))
    harness.submit("first", PROMPT, max_tokens=50)
    harness.submit("second", PROMPT[::-1], timeout_s=1.0)
    harness.step(3)
    harness.now = 1.5
    harness.step()
    assert harness.reason("second") is FinishReason.ERROR
    assert harness.tokens("second") == []


def test_a_replayed_request_goes_on_after_what_was_delivered() -> None:
    harness = Harness(ScriptedRunner(pool()))
    wanted = harness.expected(PROMPT, 8)
    harness.submit("a", PROMPT, wanted[:3], max_tokens=8)
    harness.run()
    assert harness.tokens("a") == wanted[3:]


@pytest.mark.parametrize(
    ("params", "reason"), [({}, FinishReason.LENGTH), ({"max_tokens": 9, "ignore_eos": False}, FinishReason.STOP)]
)
def test_a_replayed_request_that_was_at_its_end_ends_at_once(params: dict, reason: FinishReason) -> None:
    harness = Harness(ScriptedRunner(pool()))
    harness.submit("a", PROMPT, [4, 4, 4, 4, 4, 4, 4, EOS], **params)
    harness.run()
    assert harness.tokens("a") == []
    assert harness.reason("a") is reason
    assert harness.runner.plans == []


def test_each_sink_is_called_once_a_step_with_its_own_batch() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(overlap=False))
    harness.submit("a", PROMPT, max_tokens=3)
    harness.submit("b", PROMPT[:2], max_tokens=3)
    harness.run()
    assert [[event.request_id for event in batch] for batch in harness.deliveries] == [["a", "b"]] * 3


def test_a_sink_that_fails_loses_its_requests_and_nobody_else_does() -> None:
    class Broken:
        def deliver(self, events: list[TokenEvent]) -> None:
            raise OSError("the peer is gone")

    harness = Harness(ScriptedRunner(pool()))
    harness.engine.submit(make_request("lost", PROMPT, max_tokens=1000), Broken())
    harness.submit("kept", PROMPT, max_tokens=20)
    harness.run(limit=100)
    assert harness.tokens("kept") == harness.expected(PROMPT, 20)
    assert harness.engine.stats().running == 0


def test_the_first_event_says_what_the_prefix_cache_gave() -> None:
    harness = Harness(ScriptedRunner(pool(block_size=4)))
    prompt = list(range(2, 15))
    harness.submit("cold", prompt)
    harness.run()
    harness.submit("warm", prompt)
    harness.run()
    assert [event.num_cached for event in harness.events["cold"]] == [0] * 8
    assert [event.num_cached for event in harness.events["warm"]] == [12] + [0] * 7
    assert harness.tokens("warm") == harness.tokens("cold")


def test_salts_share_no_prefix_and_a_reset_empties_the_cache() -> None:
    harness = Harness(ScriptedRunner(pool(block_size=4)))
    prompt = list(range(2, 15))

    def cached(name: str, salt: str | None = None) -> int:
        harness.submit(name, prompt, cache_salt=salt)
        harness.run()
        return harness.events[name][0].num_cached

    salts = ("a", "b", "a", None, None)
    assert [cached(str(number), salt) for number, salt in enumerate(salts)] == [0, 0, 12, 0, 12]
    told: list[str] = []
    harness.engine.reset_prefix_cache(lambda: told.append("done"))
    harness.step()
    assert told == ["done"]
    assert [cached(name, "a") for name in ("x", "y")] == [0, 12]
    assert cached("z") == 0


def test_logprobs_come_with_each_token_and_add_up() -> None:
    harness = Harness(ScriptedRunner(pool()))
    harness.submit("a", PROMPT, max_tokens=3, logprobs=0)
    harness.run()
    assert [event.logprobs[0].ids for event in harness.events["a"] if event.logprobs] == [
        [token] for token in harness.tokens("a")
    ]
    assert harness.end("a").cumulative_logprob == -1.5


@pytest.mark.parametrize("chunk_size", [0, 3])
def test_prompt_logprobs_are_put_together_across_chunks_and_need_the_whole_prompt(chunk_size: int) -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(chunk_size=chunk_size))
    prompt = list(range(2, 15))
    harness.submit("warm up", prompt)
    harness.run()
    harness.submit("a", prompt, max_tokens=2, prompt_logprobs=0)
    harness.run()
    first, second = harness.events["a"]
    assert first.num_cached == 0
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.ids for entry in first.prompt_logprobs[1:] if entry] == [[token] for token in prompt[1:]]
    assert second.prompt_logprobs is None
