"""Graphs pad steps to shapes; padding must not change a token, and every shape must be captured once."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from engine.cache.writes import BlockWrite
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.core.plan import RowStart, StepPlan
from engine.runner import build
from engine.runner import graphs as graphs_of
from engine.runner.graphs import (
    BOUNDED_PAST,
    Capture,
    Compute,
    Replay,
    StepGraphs,
    find_wave_aligned_tokens,
    longest_prompt,
    mixed_shapes,
    unowned,
)
from engine.runner.inputs import MULTI_TOKEN_ENTRIES, StepShape
from engine.runner.pending import ComputedStep, DecodedStep, MaskedStep
from engine.runner.runner import DeviceRunner
from engine.sampling.sampler import Drawn
from engine.types import SamplingParams, TokenLogprobs
from kernels.thresholds import SHORT_CONTEXT

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
BLOCK = 16
BLOCKS_A_ROW = 10


class Recorder:
    """Stands in for a CUDA capture: a replay computes the shape again, on what is staged by then."""

    def __init__(self) -> None:
        self.captured: list[StepShape] = []
        self.replayed: list[StepShape] = []

    def __call__(self, compute: Compute, shape: StepShape) -> Replay:
        self.captured.append(shape)

        def replay() -> ComputedStep:
            self.replayed.append(shape)
            return compute(shape)

        return replay


class DrawingRecorder(Recorder):
    """Draws plainly within the replay, as a CUDA graph does, whoever draws behind it."""

    def __call__(self, compute: Compute, shape: StepShape) -> Replay:
        replay = super().__call__(compute, shape)

        def drawn() -> ComputedStep:
            computed = replay()
            found = computed.draw()
            return replace(computed, draw=lambda: found)

        return drawn


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def make_runner(checkpoint: Path, capture: Capture | None, max_rows: int = 16) -> DeviceRunner:
    config = EngineConfig(
        model=str(checkpoint),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=max_rows, token_budget=512),
        cache=CacheConfig(block_size=BLOCK, num_blocks=1 + max_rows * BLOCKS_A_ROW),
        runtime=RuntimeConfig(device="cpu"),
    )
    runner = build.build_runner(config)
    if capture is not None:
        runner.use_graphs(capture)
    return runner


def own_blocks(row: int, count: int = BLOCKS_A_ROW) -> BlockWrite:
    return BlockWrite(0, row, 0, list(range(1 + row * count, 1 + (row + 1) * count)))


def greedy(
    runner: DeviceRunner, prompts: list[list[int]], steps: int, heard: list[TokenLogprobs] | None = None
) -> list[list[int]]:
    """Each prompt alone in a step of its own, then all of them together, token by token. heard: takes what is said of
    each token, if it is given."""
    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=None if heard is None else 3)
    tokens = []
    for row, prompt in enumerate(prompts):
        plan = StepPlan(
            row,
            [row],
            [0],
            [len(prompt)],
            [True],
            starts=[RowStart(row, prompt, len(prompt), params)],
            block_writes=[own_blocks(row)],
        )
        result = runner.launch(plan).wait()
        tokens.append(list(result.tokens))
        if heard is not None:
            heard += result.logprobs[0]
    lengths = [len(prompt) for prompt in prompts]
    rows = list(range(len(prompts)))
    for step in range(steps):
        first = [length + step for length in lengths]
        result = runner.launch(StepPlan(100 + step, rows, first, [1] * len(rows), [True] * len(rows))).wait()
        for row, token in enumerate(result.tokens):
            tokens[row].append(token)
        if heard is not None:
            heard += [entry for row in rows for entry in result.logprobs[row]]
    return tokens


def prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    lengths = [16, 17, 40, 64, 96, 5, 1, 31, 33, 90][:count]
    return [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(("entries", "shape"), [(9, 16), (5, 8), (3, 4), (8, 8), (1, 1)])
def test_padded_steps_draw_the_same_tokens(checkpoint: Path, entries: int, shape: int) -> None:
    given = prompts(entries, torch.Generator().manual_seed(entries))
    recorder = Recorder()
    padded = greedy(make_runner(checkpoint, recorder), given, steps=6)
    assert padded == greedy(make_runner(checkpoint, None), given, steps=6)
    assert recorder.captured[-1] == StepShape(shape, shape, shape, 1, 256)
    assert len(recorder.replayed) >= 5
    assert len(set(recorder.captured)) == len(recorder.captured)


def test_an_entry_that_outgrows_its_graph_draws_the_same_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(1, torch.Generator().manual_seed(1))
    (length,) = map(len, given)
    monkeypatch.setattr(graphs_of, "SHORT_CONTEXT", length + 3)
    recorder = Recorder()
    assert greedy(make_runner(checkpoint, recorder), given, 6) == greedy(make_runner(checkpoint, None), given, 6)
    bounds = [shape.max_context for shape in recorder.captured if shape.num_single]
    assert bounds == [length + 3, 256], "one graph up to the bound, another behind it"
    assert [shape.max_context for shape in recorder.replayed] == [length + 3] * 2 + [256] * 2


@pytest.mark.parametrize("entries", [1, 5, 9, 16])
def test_padded_steps_say_the_same_of_their_tokens(checkpoint: Path, entries: int) -> None:
    given = (prompts(10, torch.Generator().manual_seed(entries)) * 2)[:entries]
    recorder = Recorder()
    padded: list[TokenLogprobs] = []
    eager: list[TokenLogprobs] = []
    assert greedy(make_runner(checkpoint, recorder), given, 3, padded) == greedy(
        make_runner(checkpoint, None), given, 3, eager
    )
    assert len(recorder.replayed) >= 2
    for a, b in zip(padded, eager, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_prompt_is_padded_by_a_dummy_entry(checkpoint: Path) -> None:
    recorder = Recorder()
    greedy(make_runner(checkpoint, recorder), prompts(5, torch.Generator().manual_seed(0)), steps=0)
    assert [(s.entries, s.tokens, s.num_single) for s in recorder.captured] == [
        (2, 16, 0),
        (2, 32, 0),
        (2, 64, 0),
        (2, 96, 0),
    ]


def test_steps_with_more_entries_or_tokens_than_the_largest_shape_run_eagerly(checkpoint: Path) -> None:
    graphs = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 256)
    assert graphs.fit(StepPlan(0, list(range(12)), [5] * 12, [1] * 12, [True] * 12)) == graphs.decode(12)
    assert graphs.fit(StepPlan(0, [0, 1], [0, 0], [7, 9], [True, True])) == graphs.mixed(8, 128)
    assert graphs.fit(StepPlan(0, [0, 1, 2], [9, 0, 0], [1, 9, 9], [True] * 3)) == graphs.mixed(8, 128)
    chunks = [0] * (MULTI_TOKEN_ENTRIES - 1)
    most = StepPlan(
        0, [*range(MULTI_TOKEN_ENTRIES)], [9, *chunks], [1, *(9 for _ in chunks)], [True] * MULTI_TOKEN_ENTRIES
    )
    assert graphs.fit(most) == graphs.mixed(8, 128)
    more = StepPlan(
        0, [*range(MULTI_TOKEN_ENTRIES)], [0, *chunks], [9, *(9 for _ in chunks)], [True] * MULTI_TOKEN_ENTRIES
    )
    assert graphs.fit(more) is None
    assert graphs.fit(StepPlan(0, [0], [0], [300], [True])) is None


def test_one_entry_of_a_short_context_has_a_graph_of_its_own() -> None:
    graphs = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 8192)

    def bound(entries: int, cached: int) -> int:
        shape = graphs.fit(StepPlan(0, list(range(entries)), [cached] * entries, [1] * entries, [True] * entries))
        assert shape is not None
        assert shape.max_context > cached
        return shape.max_context

    assert bound(1, 0) == bound(1, SHORT_CONTEXT - 1) == SHORT_CONTEXT
    assert bound(1, SHORT_CONTEXT) == bound(1, 8191) == bound(2, 0) == 8192
    assert {graphs.decode(1, 1), graphs.decode(1)} < set(graphs.first_shapes), "none is waited for as it grows"
    short = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, SHORT_CONTEXT - 1)
    assert short.decode(1, 1) == short.decode(1)
    assert len(short.first_shapes) == len(set(short.first_shapes))


def test_a_bound_on_the_total_context_holds_all_that_longer_entries_have() -> None:
    graphs = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 8192, bounded=True)
    for first, count, held in ((0, 100, 100), (BOUNDED_PAST, 100, BOUNDED_PAST + 100), (BOUNDED_PAST + 1, 100, 0)):
        alone = graphs.fit(StepPlan(0, [0], [first], [count], [True]))
        beside = graphs.fit(StepPlan(0, [0, 1, 2], [9, 500, first], [1, 1, count], [True] * 3))
        assert alone is not None
        assert beside is not None
        for shape in (alone, beside):
            # dummy entries hold what fills the step up
            dummies = shape.tokens - shape.num_single - count
            assert shape.max_total_context >= held + dummies if held else shape.max_total_context == 0
    assert graphs.fit(StepPlan(0, [0], [9], [1], [True])) == graphs.decode(1, 10)


@pytest.mark.parametrize(("rows", "largest"), [(1, 0), (2, 2), (16, 16), (40, 40), (256, 256), (900, 512)])
def test_any_number_of_decoding_rows_has_a_shape_beside_prompts(rows: int, largest: int) -> None:
    shapes = mixed_shapes(rows, 8192)
    assert max(shapes.rows, default=0) == largest
    assert list(shapes.rows) == sorted(set(shapes.rows))
    assert all(shapes.fit(decoding, 300, 1) for decoding in range(1, min(rows, largest)))


EXTRAS = {
    "bias": {"logit_bias": {7: 100.0}},
    "banned at first": {"min_tokens": 3, "stop_token_ids": tuple(range(0, 256, 2))},
    "allowed": {"allowed_token_ids": (11, 12, 13)},
    "repetition": {"repetition_penalty": 1.8},
    "presence and logprobs": {"presence_penalty": 2.0, "repetition_penalty": 1.3, "logprobs": 2},
    "frequency, sampled": {"frequency_penalty": 0.7, "temperature": 0.9, "seed": 5},
    "nothing": {},
}


def with_extras(runner: DeviceRunner, extras: list[dict[str, Any]], steps: int) -> list[list[int]]:
    """The tokens of each step by row: rows with sampling extras each, of which the last joins in the second step."""
    given = prompts(len(extras), torch.Generator().manual_seed(7))
    starts = [
        RowStart(row, prompt, len(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **extra}))
        for row, (prompt, extra) in enumerate(zip(given, extras, strict=True))
    ]
    writes = [own_blocks(row) for row in range(len(given))]
    held = [0] * len(given)
    told = []
    for step in range(steps):
        rows = sorted(range(len(given) - (step == 0)), key=lambda row: held[row] == 0)
        counts = [1 if held[row] else len(given[row]) for row in rows]
        first = [held[row] for row in rows]
        new = [starts[row] for row in rows if not held[row]]
        plan = StepPlan(step, rows, first, counts, [True] * len(rows), new, [] if step else writes)
        drawn = dict(zip(rows, runner.launch(plan).wait().tokens, strict=True))
        told.append([drawn[row] for row in sorted(rows)])
        for row, count in zip(rows, counts, strict=True):
            held[row] += count
    return told


class Counts:
    """How often a runner's head and its draws ran."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.heads = self.draws = 0
        self._logits, self._draw = runner.decoder.logits, runner._draw
        runner.decoder.logits = self._count_head  # type: ignore[method-assign]
        runner._draw = self._count_draw  # type: ignore[method-assign]

    def _count_head(self, x: torch.Tensor) -> torch.Tensor:
        self.heads += 1
        return self._logits(x)

    def _count_draw(self, *arguments: Any) -> Drawn:
        self.draws += 1
        return self._draw(*arguments)


@pytest.mark.parametrize("name", [*EXTRAS, "logprobs", "masks"])
def test_a_replayed_step_computes_its_logits_and_draws_once(checkpoint: Path, name: str) -> None:
    runner = make_runner(checkpoint, Recorder())
    asked = {"logprobs": 2} if name == "logprobs" else EXTRAS.get(name, {})
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **asked})
    start = RowStart(0, [3] * 9, 9, params)
    runner.launch(StepPlan(0, [0], [0], [9], [True], starts=[start], block_writes=[own_blocks(0)])).wait()
    runner.launch(StepPlan(1, [0], [9], [1], [True])).wait()  # makes the graph
    counts = Counts(runner)
    for step in (2, 3):
        pending = runner.launch(StepPlan(step, [0], [8 + step], [1], [True], masked=[0] if name == "masks" else []))
        if name == "masks":
            assert counts.draws == step - 2, "the draw waits for its mask"
            cast(MaskedStep, pending).mask_rows(1, 320 // 32).fill(-1)
            cast(MaskedStep, pending).draw()
        pending.wait()
        assert (counts.heads, counts.draws) == (step - 1, step - 1)


def test_logits_of_a_graph_are_read_where_they_are_without_keeping_their_memory() -> None:
    logits = torch.arange(24.0).view(4, 6)[1:, :5]
    alias = unowned(logits)
    logits[1, 2] = 100
    assert torch.equal(alias, logits)
    assert alias.stride() == logits.stride()
    held = weakref.ref(logits)
    del logits
    assert held() is None


@pytest.mark.parametrize("name", EXTRAS)
def test_replayed_steps_apply_their_entries_extras(checkpoint: Path, name: str) -> None:
    extras = [EXTRAS[name], {}, {}, EXTRAS[name], {}, {}]
    recorder = Recorder()
    padded = with_extras(make_runner(checkpoint, recorder), extras, steps=6)
    assert padded == with_extras(make_runner(checkpoint, None), extras, steps=6)
    assert len(recorder.replayed) >= 3
    plain = with_extras(make_runner(checkpoint, None), [{}] * 6, steps=6)
    assert (padded == plain) == (name == "nothing")


def test_entries_of_one_step_each_get_their_own_extras(checkpoint: Path) -> None:
    extras = list(EXTRAS.values())
    padded = with_extras(make_runner(checkpoint, Recorder()), extras, steps=6)
    assert padded == with_extras(make_runner(checkpoint, None), extras, steps=6)
    assert {step[0] for step in padded} == {7}
    assert {step[2] for step in padded} <= {11, 12, 13}


def test_idle_time_makes_every_shape_once(checkpoint: Path) -> None:
    recorder = Recorder()
    runner = make_runner(checkpoint, recorder)
    while runner.idle():
        pass
    assert runner.graphs is not None
    assert len(recorder.captured) == len(set(recorder.captured))
    assert set(runner.graphs.first_shapes) <= set(recorder.captured)
    assert {s.entries for s in recorder.captured if s.entries == s.num_single} == {1, 2, 4, 8, 16}
    assert {s.num_single for s in recorder.captured if 0 < s.num_single < s.entries} == {8, 16}


@pytest.mark.parametrize(
    ("ranks", "sliced", "longest"), [(1, False, 2048), (2, False, 4096), (4, False, 8192), (4, True, 2048)]
)
def test_a_prompt_has_a_graph_while_its_launches_take_longer_than_the_gpu(
    ranks: int, sliced: bool, longest: int
) -> None:
    most = longest_prompt(ranks, sliced)
    graphs = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 64, 16384, 20480, max_prompt_tokens=most)
    assert graphs.fit(StepPlan(0, [0], [0], [longest], [True])) == graphs.prompt(longest)
    assert graphs.fit(StepPlan(0, [0], [0], [longest + 1], [True])) is None
    few = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 64, longest - 1, 20480, max_prompt_tokens=most)
    assert few.fit(StepPlan(0, [0], [0], [longest - 1], [True])) is None, "no more tokens than a step may have"


def test_steps_of_a_full_server_are_made_first() -> None:
    """A row that decodes, then prompts beside rows as the prefill policy fills steps, then prompts alone, then all
    others."""

    def capture(compute: Compute, shape: StepShape) -> Replay:
        return lambda: compute(shape)

    nothing = torch.zeros(1, 1)
    outcome = ComputedStep(DecodedStep(nothing, nothing), nothing, lambda: Drawn(nothing))
    graphs = StepGraphs(lambda shape: outcome, capture, 64, 8192, 20480)
    made: list[StepShape] = []
    while (shape := graphs.next_shape) is not None:
        made.append(shape)
        graphs.run(shape)
    assert len(made) == len(set(made))
    decoding = [shape for shape in made if shape.entries == shape.num_single]
    filled = graphs.mixed_shapes.wave_aligned_tokens
    assert made[: len(decoding)] == decoding
    assert made[len(decoding) : len(decoding) + 4] == [graphs.mixed(n, filled) for n in (8, 16, 32, 64)]
    alone = made.index(graphs.prompt(1024))
    assert made.index(graphs.mixed(64, 1088)) < alone < made.index(graphs.mixed(8, 128))


@pytest.mark.parametrize(("widest", "tokens"), [(14336, 1024), (9728, 1536), (12288, 1024), (9216, 1152), (0, 1536)])
def test_a_pace_fills_the_step_whose_tiles_come_out_even(widest: int, tokens: int) -> None:
    """Of Llama-3.1-8B, Qwen3-4B, Qwen3-8B, Qwen3.5-4B and of experts, on 132 multiprocessors."""
    assert find_wave_aligned_tokens(widest, 132) == tokens
    assert mixed_shapes(64, 8192, find_wave_aligned_tokens(widest, 132)).wave_aligned_tokens == tokens


@pytest.mark.parametrize("lengths", [[2, 3], [40, 17, 5], [30] * 7])
def test_prompts_together_draw_the_same_tokens(checkpoint: Path, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    given = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths]
    drawn = []
    recorder = Recorder()
    for runner in (make_runner(checkpoint, recorder), make_runner(checkpoint, None)):
        runner.launch(start_plan(1, given)).wait()  # captures, and is replayed by the same again
        drawn.append(runner.launch(start_plan(2, given)).wait().tokens)
    assert drawn[0] == drawn[1]
    assert [shape.num_single for shape in recorder.replayed] == [8]


def start_plan(step: int, given: list[list[int]]) -> StepPlan:
    """A step of whole prompts, each in blocks of its row's own."""
    params = SamplingParams(temperature=0.0, max_tokens=9)
    rows = list(range(len(given)))
    return StepPlan(
        step,
        rows,
        [0 for _ in rows],
        [len(prompt) for prompt in given],
        [True for _ in rows],
        [RowStart(row, given[row], len(given[row]), params) for row in rows],
        [own_blocks(row) for row in rows],
    )


@pytest.mark.parametrize(("decoding", "entries"), [(1, 8), (5, 8), (8, 8), (10, 16)])
@pytest.mark.parametrize("tokens", [2, 40, 100])
def test_a_prompt_beside_decode_entries_draws_the_same_tokens(
    checkpoint: Path, decoding: int, entries: int, tokens: int
) -> None:
    given = prompts(decoding, torch.Generator().manual_seed(decoding))
    late = torch.randint(0, 320, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    drawn = []
    recorder = Recorder()
    for runner in (make_runner(checkpoint, recorder), make_runner(checkpoint, None)):
        tokens_so_far = greedy(runner, given, steps=2)
        rows = list(range(decoding))
        first = [len(prompt) + 2 for prompt in given]
        start = RowStart(15, late, len(late), SamplingParams(temperature=0.0, max_tokens=9))
        plan = StepPlan(
            50,
            [*rows, 15],
            [*first, 0],
            [*[1] * decoding, tokens],
            [True] * (decoding + 1),
            starts=[start],
            block_writes=[own_blocks(15)],
        )
        both = runner.launch(plan).wait().tokens
        after = StepPlan(
            51, [*rows, 15], [*[f + 1 for f in first], tokens], [1] * (decoding + 1), [True] * (decoding + 1)
        )
        drawn.append((tokens_so_far, both, runner.launch(after).wait().tokens))
    assert drawn[0] == drawn[1]
    assert entries in {shape.num_single for shape in recorder.captured if shape.num_single < shape.entries}


def test_a_model_that_cannot_be_captured_runs_eagerly(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(compute: Compute, shape: StepShape) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    given = prompts(3, torch.Generator().manual_seed(3))
    runner = make_runner(checkpoint, None)
    want = greedy(runner, given, steps=3)
    runner.use_graphs(refuse)
    assert greedy(runner, given, steps=3) == want
    assert caplog.text.count("graphs are off") == 1
    assert not runner.idle()
