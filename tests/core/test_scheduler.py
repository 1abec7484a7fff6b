"""How steps are filled: budget, chunks, mixing, admission, preemption, waiting for a shared prefix."""

from __future__ import annotations

import sys

import pytest

from engine.config import CacheConfig, SchedulerConfig
from engine.core.plan import MixedShapes, StepPlan
from engine.core.prefill_policy import PrefillPolicy, choose_prefill_policy
from tests.core.harness import Harness, make_config
from tests.core.scripted_runner import ScriptedRunner, pool


def prompt(length: int, start: int = 2) -> list[int]:
    return [start + i % 40 for i in range(length)]


def prefilled(plan: StepPlan) -> int:
    return sum(count for count in plan.count if count > 1)


def test_one_step_holds_decoding_rows_and_chunks_with_single_entries_first() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=16))
    harness.submit("a", prompt(4))
    harness.step(2)
    harness.submit("b", prompt(40, 9))
    harness.step()
    plan = harness.runner.plans[-1]
    assert (plan.rows, plan.count, plan.samples) == ([0, 1], [1, 15], [True, False])


@pytest.mark.parametrize(("chunk_size", "chunks"), [(0, [16, 16, 8]), (7, [7, 7, 7, 7, 7, 5])])
def test_a_prompt_is_cut_by_budget_and_chunk_size(chunk_size: int, chunks: list[int]) -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=16, chunk_size=chunk_size))
    harness.submit("a", prompt(40), max_tokens=1)
    harness.run()
    assert [plan.count for plan in harness.runner.plans] == [[count] for count in chunks]
    assert [plan.samples for plan in harness.runner.plans] == [[False]] * (len(chunks) - 1) + [[True]]


def test_decoding_rows_are_served_in_every_step_of_a_long_prompt() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=8, overlap=False))
    harness.submit("a", prompt(4), max_tokens=20)
    harness.step()
    harness.submit("long", prompt(100, 9))
    for _ in range(12):
        harness.step()
        assert harness.runner.plans[-1].count[0] == 1
        assert prefilled(harness.runner.plans[-1]) == 7
    assert len(harness.tokens("a")) == 13


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"mixed_budget": 5}, 5),
        ({"preference": "balanced"}, 59),
        ({"preference": "throughput"}, 59),
        ({"mixed_budget": 5, "preference": "throughput"}, 5),
    ],
)
def test_the_share_of_prompts_in_a_mixed_step_is_bounded(settings: dict[str, object], share: int) -> None:
    harness = Harness(ScriptedRunner(pool(200)), make_config(token_budget=60, **settings))
    harness.submit("a", prompt(4), max_tokens=20)
    harness.step(2)
    harness.submit("long", prompt(200, 9))
    harness.step()
    assert prefilled(harness.runner.plans[-1]) == share


def test_latency_preference_bounds_mixed_steps_only() -> None:
    harness = Harness(ScriptedRunner(pool(2000)), make_config(token_budget=4000, preference="latency"))
    harness.submit("first", prompt(3000), max_tokens=20)
    harness.step()
    assert harness.runner.plans[-1].count == [3000]
    harness.submit("second", prompt(3000, 9))
    harness.step()
    assert harness.runner.plans[-1].count == [1, 512]


def test_prompts_beside_decoding_rows_come_in_shares() -> None:
    policy, none = PrefillPolicy(min_tokens=256, tokens_per_row=12), MixedShapes()
    assert policy.prefill_tokens(1, 300, none) == 256
    assert policy.prefill_tokens(64, 300, none) == 768
    assert policy.prefill_tokens(64, 65_536, none) == 768


def test_above_the_backlog_threshold_a_step_uses_the_whole_budget() -> None:
    policy = PrefillPolicy(min_tokens=256, tokens_per_row=12, backlog_threshold=2000)
    assert policy.prefill_tokens(64, 1_999, MixedShapes()) == 768
    assert policy.prefill_tokens(64, 2_000, MixedShapes()) is None
    policy = PrefillPolicy(min_tokens=256, tokens_per_row=12, backlog_threshold=2000, backlog_threshold_per_row=100)
    assert policy.prefill_tokens(64, 8_399, MixedShapes()) == 768
    assert policy.prefill_tokens(64, 8_400, MixedShapes()) is None


def test_a_model_with_experts_has_a_lower_backlog_threshold() -> None:
    dense, experts, calm = (
        choose_prefill_policy(*of, 16.0, 1024) for of in (("balanced", 1.0), ("balanced", 0.1), ("latency", 0.1))
    )
    backlog = 8 * 1024
    assert dense.prefill_tokens(56, backlog, MixedShapes()) == 1792
    assert experts.prefill_tokens(56, backlog, MixedShapes()) is None
    assert calm.prefill_tokens(56, backlog, MixedShapes()) == 512
    assert [of.prefill_tokens(4, 40 * 1024, MixedShapes()) for of in (dense, experts, calm)] == [None] * 3
    assert choose_prefill_policy("throughput", 1.0, 16.0, 1024) == experts
    assert choose_prefill_policy("throughput", 0.1, 16.0, 1024) == experts
    assert choose_prefill_policy("balanced", 1.0, 4.25, 1024) == experts, "quantized weights cost each step as much"
    assert (dense.wave_aligned_tokens, experts.wave_aligned_tokens, calm.wave_aligned_tokens) == (1024, 1024, 0)


@pytest.mark.parametrize(("waiting", "counts"), [(1, [1024]), (2, [1500, 1500])])
def test_one_prompt_at_a_time_beside_decoding_rows_or_the_whole_backlog(waiting: int, counts: list[int]) -> None:
    harness = Harness(ScriptedRunner(pool(4000)), make_config(token_budget=6000, max_rows=16))
    harness.submit("first", prompt(4), max_tokens=60)
    harness.step()
    for i in range(waiting):
        harness.submit(f"{i}", prompt(1500, 5 + i), max_tokens=60)
    harness.step()
    assert harness.runner.plans[-1].count == [1, *counts]
    harness.run()
    assert all(harness.tokens(f"{i}") == harness.expected(prompt(1500, 5 + i), 60) for i in range(waiting))


def test_a_share_fills_the_shape_that_the_step_is_padded_to() -> None:
    shapes = MixedShapes(rows=(8, 16, 32), tokens=(128, 512, 1024, 2048), chunks=7)
    assert shapes.room(5, 1536) == 1024 - 8 - 6
    assert shapes.room(16, 2048) == 2048 - 16 - 6
    assert [shapes.room(33, 1536), shapes.room(5, 127), MixedShapes().room(5, 1536)] == [0, 0, 0]
    assert [shapes.padded(5, 1010, 1), shapes.padded(5, 1011, 1), shapes.padded(5, 1011, 2)] == [1024, 2048, 1024]
    assert [shapes.padded(33, 50, 1), shapes.padded(5, 50, 8), shapes.padded(5, 0, 0)] == [83, 55, 5]
    policy = PrefillPolicy(min_tokens=256, tokens_per_row=12, wave_aligned_tokens=1536)
    assert policy.prefill_tokens(9, 3000, shapes) == 1024 - 16 - 6
    assert policy.prefill_tokens(40, 3000, shapes) == 480
    assert policy.prefill_tokens(9, 3000, MixedShapes()) == 256


def test_rows_that_leave_little_of_a_shape_take_no_share_that_fills_it() -> None:
    shapes = MixedShapes(rows=(64, 128), tokens=(1024,), chunks=7)
    policy = PrefillPolicy(min_tokens=256, tokens_per_row=12, wave_aligned_tokens=1536)
    assert policy.prefill_tokens(64, 3000, shapes) == 1024 - 64 - 6
    assert policy.prefill_tokens(100, 3000, shapes) == 1200


def test_the_engine_asks_its_runner_for_shapes() -> None:
    runner = ScriptedRunner(pool(4000), mixed=MixedShapes(rows=(4,), tokens=(512, 1200, 1600), chunks=3))
    harness = Harness(runner, make_config(token_budget=6000))
    harness.loop.scheduler.prefill_policy = PrefillPolicy(min_tokens=256, tokens_per_row=12, wave_aligned_tokens=1536)
    harness.submit("first", prompt(4), max_tokens=60)
    harness.step()
    harness.submit("second", prompt(3000, 9))
    harness.step()
    assert harness.runner.plans[-1].count == [1, 1200 - 4 - 2]


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token_budget \(8\) must be at least max_rows \(16\)"):
        SchedulerConfig(max_rows=16, token_budget=8)


def test_a_checkpoint_interval_off_the_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of block_size"):
        CacheConfig(block_size=32, checkpoint_interval=48)


def test_rows_are_reused_and_bounded() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(max_rows=2))
    for name in "abcde":
        harness.submit(name, prompt(3, ord(name) - 90), max_tokens=3)
    harness.run()
    assert all(set(plan.rows) <= {0, 1} for plan in harness.runner.plans)
    assert max(len(plan.rows) for plan in harness.runner.plans) == 2


def test_lower_priority_values_go_first() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(max_rows=1))
    harness.submit("running", prompt(3), max_tokens=3)
    harness.step()
    harness.submit("late", prompt(3, 9), priority=0)
    harness.submit("low", prompt(3, 12), priority=5)
    harness.submit("urgent", prompt(3, 15), priority=-1)
    harness.run()
    assert list(harness.events) == ["running", "urgent", "late", "low"]


def test_the_youngest_is_preempted_and_loses_nothing() -> None:
    # 11 blocks of 4 hold one request of 40 tokens and one more block.
    harness = Harness(ScriptedRunner(pool(12)), make_config(prefix_cache=False))
    for name, start in (("old", 2), ("young", 9)):
        harness.submit(name, prompt(12, start), max_tokens=24)
    harness.run()
    assert harness.engine.stats().preemptions > 0
    assert harness.tokens("old") == harness.expected(prompt(12), 24)
    assert harness.tokens("young") == harness.expected(prompt(12, 9), 24)
    restarts = [start for plan in harness.runner.plans for start in plan.starts][2:]
    assert all(list(start.token_ids[:12]) == prompt(12, 9) for start in restarts), "the older one never gives way"
    assert all(len(start.token_ids) > 12 and start.num_prompt == 12 for start in restarts)


def test_a_preempted_request_finds_its_own_blocks_in_the_tree() -> None:
    harness = Harness(ScriptedRunner(pool(12)), make_config(prefix_cache=True))
    for name, start in (("old", 2), ("young", 9)):
        harness.submit(name, prompt(12, start), max_tokens=24)
    harness.run()
    again = [start.row for plan in harness.runner.plans for start in plan.starts][2:]
    assert again
    assert harness.tokens("young") == harness.expected(prompt(12, 9), 24)
    assert [event.num_cached for event in harness.events["young"] if event.num_cached] == []


def test_the_head_of_the_queue_is_not_overtaken_for_lack_of_blocks() -> None:
    harness = Harness(ScriptedRunner(pool(16)), make_config())
    harness.submit("running", prompt(20), max_tokens=8)
    harness.step()
    harness.submit("big", prompt(40, 9), max_tokens=2)
    harness.submit("small", prompt(2, 14), max_tokens=2)
    harness.run()
    assert list(harness.events) == ["running", "big", "small"]


def test_a_head_that_does_not_fit_is_not_tried_again_until_something_came_free() -> None:
    harness = Harness(ScriptedRunner(pool(16)), make_config())
    harness.submit("running", prompt(20), max_tokens=16)
    harness.step()
    harness.submit("big", prompt(40, 9), max_tokens=2)
    tried = 0
    admit = harness.loop.kv.admit

    def counted(*args):  # type: ignore[no-untyped-def]
        nonlocal tried
        tried += 1
        return admit(*args)

    harness.loop.kv.admit = counted  # type: ignore[method-assign]
    harness.step(10)
    assert tried == 1
    harness.run()
    assert tried == 2
    assert harness.tokens("big") == harness.expected(prompt(40, 9), 2)


def test_siblings_sent_together_compute_their_prompt_once() -> None:
    """n requests over one prompt: the first computes it, the others wait for its blocks instead of computing too."""
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=64))
    shared = prompt(33)
    for i in range(4):
        harness.submit(str(i), shared, seed=i)
    harness.run()
    computed = sum(prefilled(plan) for plan in harness.runner.plans)
    assert computed == 33
    stats = harness.engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (4 * 33, 3 * 32)
    assert all(harness.tokens(str(i)) == harness.expected(shared) for i in range(4))


def test_who_waits_for_a_prefix_does_not_hold_up_the_others() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=16))
    harness.submit("first", prompt(33))
    harness.submit("sibling", prompt(33))
    harness.submit("other", prompt(3, 30))
    harness.step(3)
    assert [start.num_prompt for plan in harness.runner.plans for start in plan.starts] == [33, 3]


def test_a_waiting_sibling_goes_on_when_the_one_it_waits_for_is_cancelled() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=16))
    harness.submit("first", prompt(65))
    harness.submit("sibling", prompt(65))
    harness.step(2)
    harness.engine.abort("first")
    harness.run()
    assert harness.tokens("sibling") == harness.expected(prompt(65))


def test_a_small_common_beginning_is_not_waited_for() -> None:
    harness = Harness(ScriptedRunner(pool()), make_config(token_budget=64))
    harness.submit("a", prompt(4) + prompt(24, 9))
    harness.submit("b", prompt(4) + prompt(24, 12))
    harness.step()
    assert len(harness.runner.plans[0].rows) == 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("length", "chunks"), [(14, [12, 2]), (13, [12, 1]), (12, [8, 4])])
def test_state_is_kept_at_the_last_full_block_of_a_prompt(overlap: bool, length: int, chunks: list[int]) -> None:
    harness = Harness(ScriptedRunner(pool(state_slots=6)), make_config(overlap=overlap))
    first = prompt(length)
    harness.submit("a", first, max_tokens=4)
    harness.run()
    assert [plan.count for plan in harness.runner.plans[:2]] == [[count] for count in chunks]
    harness.submit("b", [*first, 3, 4, 5], max_tokens=4)
    harness.run()
    assert harness.events["b"][0].num_cached == 12
    assert harness.tokens("b") == harness.expected([*first, 3, 4, 5], 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_state_is_kept_while_generating_so_that_the_next_turn_hits(overlap: bool) -> None:
    harness = Harness(ScriptedRunner(pool(state_slots=6)), make_config(checkpoint_interval=16, overlap=overlap))
    harness.submit("a", prompt(5), max_tokens=40)
    harness.run()
    turn = prompt(5) + harness.tokens("a") + [3, 4]
    harness.submit("b", turn, max_tokens=4)
    harness.run()
    assert harness.events["b"][0].num_cached == 32
    assert harness.tokens("b") == harness.expected(turn, 4)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [32, 33, 35])
def test_siblings_of_a_recurrent_model_start_from_the_state_of_the_first(overlap: bool, length: int) -> None:
    harness = Harness(ScriptedRunner(pool(state_slots=8)), make_config(overlap=overlap))
    shared = prompt(length)
    for i in range(3):
        harness.submit(str(i), shared)
    harness.run()
    assert harness.engine.stats().prefix_hit_tokens == 2 * ((length - 1) // 4 * 4)
    assert all(harness.tokens(str(i)) == harness.expected(shared) for i in range(3))


def test_blocks_that_left_the_window_come_free_while_a_request_runs() -> None:
    spec = pool(2, window=8, window_blocks=12, full=False)
    harness = Harness(ScriptedRunner(spec), make_config(prefix_cache=False))
    harness.submit("a", prompt(30), max_tokens=200)
    harness.step(60)
    assert harness.engine.stats().groups[0].used <= 4
    harness.run()
    assert harness.tokens("a") == harness.expected(prompt(30), 200)


@pytest.mark.parametrize(("block_size", "calls_a_row"), [(64, 16), (1, 60)])
def test_host_work_grows_with_the_rows_and_not_faster(block_size: int, calls_a_row: int) -> None:
    """Function calls of a steady decoding step, counted: four times the rows take at most four times the calls, whether
    no row or every row takes a new block."""

    def calls(rows: int) -> int:
        harness = Harness(
            ScriptedRunner(pool(50 * rows, block_size)), make_config(max_rows=rows, token_budget=64 * rows)
        )
        for i in range(rows):
            harness.submit(str(i), [2 + i % 40, 3 + i // 40, 5], max_tokens=40)
        for _ in range(6):
            harness.inflight = harness.loop.iterate(harness.inflight)
        step = harness.inflight
        assert step is not None
        result = step.pending.wait()
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            harness.loop.scheduler.schedule()
            harness.loop.committer.commit(step, result)
        finally:
            sys.setprofile(None)
        return count

    few, many = calls(32), calls(128)
    assert many <= 4 * few
    assert many <= 128 * calls_a_row
