"""Whatever is drafted and whatever requests ask for, each token is the one that comes without drafts."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
import transformers

from engine.api import Engine, EngineStats
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.core.commit import InFlight
from engine.core.plan import Draft, StepPlan
from engine.core.request import Drafter
from engine.runner.build import build_runner, largest_step
from engine.runner.graphs import Capture, StepGraphs
from engine.runner.inputs import StepShape
from engine.runner.pending import ComputedStep, DecodedStep
from engine.sampling.sampler import Drawn
from engine.serving.frontend.settings import SettingsError, parse
from engine.types import RequestInput, SamplingParams, TokenEvent
from tests.gate import families
from tests.gate.shapes import Shape
from tests.runner.test_graphs import DrawingRecorder, Recorder
from tests.runner.tiny import CONFIG

VOCAB = 320
REQUESTS = 12
NGRAM = SpeculationConfig(method="ngram", tokens=3)
DEEP = SpeculationConfig(method="ngram", tokens=4)


def small(shape: Shape, name: str, **more: Any) -> dict[str, Any]:
    """A family's topology with a small vocabulary and a short context."""
    short = {"vocab_size": VOCAB, "max_position_embeddings": 256, "num_hidden_layers": 2, "layer_types": None}
    made = getattr(transformers, f"{shape.kind}Config")(**{**shape.config, **short, **more})
    return {**made.to_dict(), "architectures": [name], "eos_token_id": 7}


FAMILIES: dict[str, dict[str, Any]] = {
    "dense": CONFIG,
    "experts": small(families.QWEN3_MOE, "Qwen3MoeForCausalLM", mlp_only_layers=[0]),
    "windows": small(families.MISTRAL, "MistralForCausalLM"),
    "latents": small(families.DEEPSEEK_V2, "DeepseekV2ForCausalLM", first_k_dense_replace=1),
}
# Beside those, one whose drafts are taken back from running states.
KINDS = ("linear_attention", "full_attention", "linear_attention")
NARROW = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 64, "rope_parameters": None}
STATES = small(families.QWEN3_5, "Qwen3_5ForCausalLM", num_hidden_layers=3, layer_types=list(KINDS), **NARROW)
# And one whose compressed entries are written again, from windows of tokens that were not taken back.
SPARSE = {"head_dim": 64, "qk_rope_head_dim": 16, "index_head_dim": 32, "index_n_heads": 4, "n_routed_experts": 8}
RATIOS = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
ENTRIES = small(families.DEEPSEEK_V4, "DeepseekV4ForCausalLM", **SPARSE, **RATIOS)
DRAFTED = {**FAMILIES, "states": STATES, "entries": ENTRIES}
SEEDS = {"states": (2,), "entries": (2,)}  # of requests; their references go sequence by sequence


class Heard:
    """A sink: all tokens of each request, what was said of them, and how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.said: dict[str, list[Any]] = {}
        self.ends: dict[str, Any] = {}

    def deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            self.said.setdefault(event.request_id, []).extend(event.logprobs or ())
            self.said[event.request_id].extend(entry for entry in event.prompt_logprobs or () if entry is not None)
            if event.finish_reason is not None:
                self.ends[event.request_id] = (event.finish_reason, event.stop_reason, event.error)


class Oracle:
    """Knows what requests gave without drafts, and says it with probability `right`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right: float) -> None:
        self._answers = answers
        self._right = right
        self._random = random.Random(5)

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        for prompt, answer in self._answers.items():
            given = tokens[len(prompt) :].tolist()
            if tuple(tokens[: len(prompt)]) == prompt and answer[: len(given)] == given:
                following = answer[len(given) : len(given) + count]
                return [token if self._random.random() < self._right else (token + 1) % VOCAB for token in following]
        return ()

    def close(self, given: Sequence[int]) -> None:
        """It knew them."""


def request(draw: random.Random, name: str, shared: list[int]) -> RequestInput:
    """A prompt of any length that repeats itself in parts, and any extras."""
    asked: dict[str, Any] = {"max_tokens": draw.randint(1, 28), "temperature": draw.choice((0.0, 0.0, 0.3, 0.9))}
    extras = {
        "top_k": draw.randint(1, 20),
        "top_p": draw.uniform(0.3, 1.0),
        "min_p": draw.uniform(0.0, 0.2),
        "repetition_penalty": draw.uniform(1.01, 1.8),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-1, 1),
        "logit_bias": {draw.randrange(VOCAB): draw.uniform(-100, 100)},
        "allowed_token_ids": tuple(draw.sample(range(VOCAB), 7)),
        "min_tokens": draw.randint(0, asked["max_tokens"]),
        "bad_words": ("stands for the ids below",),
        "stop_token_ids": tuple(draw.sample(range(VOCAB), 20)),
        "logprobs": draw.randint(0, 5),
        "prompt_logprobs": draw.randint(0, 3),
        "ignore_eos": True,
    }
    asked |= {name: value for name, value in extras.items() if draw.random() < 0.2}
    words = [[draw.randrange(VOCAB)] for _ in range(3)] if "bad_words" in asked else []
    own = [draw.randrange(8, 24) for _ in range(draw.choice((1, 5, 40, 90)))]
    prompt = (shared if draw.random() < 0.4 else []) + own * draw.choice((1, 2))
    params = SamplingParams(seed=draw.randint(0, 999), **asked)
    return RequestInput(request_id=name, prompt_ids=prompt, params=params, bad_word_ids=words)


def requests(seed: int) -> list[RequestInput]:
    draw = random.Random(seed)
    shared = [draw.randrange(8, VOCAB) for _ in range(33)]
    return [request(draw, str(i), shared) for i in range(REQUESTS)]


def play(
    folder: Path,
    seed: int,
    speculation: SpeculationConfig,
    drafter: Callable[[], Drafter] | None = None,
    overlap: bool = True,
    dtype: Literal["float32", "bfloat16"] = "float32",
    capture: Capture | None = None,
) -> tuple[Heard, EngineStats]:
    """Requests that come at random to an engine of random limits; in bfloat16, in batch-invariant arithmetic. capture:
    makes graphs of its steps."""
    draw = random.Random(seed)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=draw.choice((3, 6, 12)), token_budget=draw.choice((40, 128, 300))),
        cache=_cache(folder, draw.choice((24, 40, 200))),
        runtime=RuntimeConfig(device="cpu", dtype=dtype, deterministic=dtype == "bfloat16", overlap=overlap),
        speculation=speculation,
    )
    heard = Heard()
    runner = build_runner(config)
    if capture is not None:
        runner.use_graphs(capture)
    engine = Engine(runner, config, drafter=drafter, draft_tokens=speculation.most)
    waiting = requests(seed)
    inflight: InFlight | None = None
    while waiting or engine.loop.live or inflight is not None:
        while waiting and draw.random() < 0.3:
            engine.submit(waiting.pop(), heard)
        inflight = engine.loop.iterate(inflight)
    engine.check_integrity()
    return heard, engine.stats()


def _cache(folder: Path, num_blocks: int) -> CacheConfig:
    """Blocks of 16 tokens, or as much room in such as whole compressed entries fill."""
    if "compress_rates" in json.loads((folder / "config.json").read_text()):
        return CacheConfig(num_blocks=2 + num_blocks // 8, block_size=128)
    return CacheConfig(num_blocks=num_blocks, checkpoint_interval=32)


def plain(folder: Path, seed: int) -> Heard:
    """What the requests give without drafts, computed once for each family: it stands for overlapped steps and for
    steps in turn."""
    return _without_drafts((folder / "config.json").read_text(), seed)


@cache
def _without_drafts(config: str, seed: int) -> Heard:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return play(Path(folder), seed, SpeculationConfig())[0]


def in_one_process(family: str) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(f"drafts, {family}")


def played(overlapped: Iterable[str], in_turn: Iterable[str] = ()) -> list[Any]:
    """Parameters: families, whether their steps overlap, and seeds of requests. `make test` has one seed with
    overlapped steps and, of dense layers, the other with steps in turn, `make test-slow` the rest."""
    made = []
    for family, overlap in (*((f, True) for f in overlapped), *((f, False) for f in in_turn)):
        seeds = SEEDS.get(family, (1, 2))
        for seed in seeds:
            marks = [in_one_process(family)]
            if len(seeds) > 1 and (overlap != (seed == 1) or (not overlap and family != "dense")):
                marks.append(pytest.mark.slow)
            name = f"{family}-{'overlapped' if overlap else 'in-turn'}-{seed}"
            made.append(pytest.param(family, overlap, seed, marks=marks, id=name))
    return made


def same(got: Heard, want: Heard) -> None:
    assert got.tokens == want.tokens
    assert got.ends == want.ends
    for name, entries in want.said.items():
        assert [entry.ids for entry in got.said[name]] == [entry.ids for entry in entries]
        assert [entry.ranks for entry in got.said[name]] == [entry.ranks for entry in entries]
        for a, b in zip(got.said[name], entries, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in DRAFTED.items():
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize(("family", "overlap", "seed"), played(DRAFTED, FAMILIES))
def test_drafts_change_no_token(folders: dict[str, Path], family: str, overlap: bool, seed: int) -> None:
    accepted, want = 0, plain(folders[family], seed)
    answers = {tuple(input.prompt_ids): want.tokens[input.request_id] for input in requests(seed)}
    for right in (0.0, 0.7, 1.0):
        got, stats = play(folders[family], seed, NGRAM, partial(Oracle, answers, right), overlap)
        same(got, want)
        accepted += stats.accepted_tokens
        share = stats.accepted_tokens / stats.draft_tokens
        assert 0.9 < share <= 1 if right == 1.0 else 0.1 < share < 0.9 if right else share == 0
    for method, tokens in (("ngram", "auto"), ("suffix", 3)):
        got, stats = play(folders[family], seed, SpeculationConfig(method=method, tokens=tokens), None, overlap)
        same(got, want)
        assert stats.drafts > 0
    assert accepted > 50


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlapped", "in-turn"])
@pytest.mark.parametrize("family", [pytest.param(family, marks=in_one_process(family)) for family in DRAFTED])
def test_drafts_change_no_token_of_padded_steps(folders: dict[str, Path], family: str, overlap: bool) -> None:
    """Over both seeds, since not in each does an entry draft less than the others."""
    recorder, accepted = Recorder(), 0
    for seed in SEEDS.get(family, (1, 2)):
        want = plain(folders[family], seed)
        answers = {tuple(input.prompt_ids): want.tokens[input.request_id] for input in requests(seed)}
        for right in (0.7, 1.0):
            got, stats = play(folders[family], seed, DEEP, partial(Oracle, answers, right), overlap, capture=recorder)
            same(got, want)
            accepted += stats.accepted_tokens
    drafted = [shape for shape in recorder.captured if shape.drafts]
    assert len({shape.drafts for shape in drafted}) > 1, "an entry that drafts less has a shape of fewer tokens"
    assert any(shape.num_single for shape in drafted)
    assert accepted > 50


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=in_one_process(family)) for family in ("dense", "states")]
)
def test_draws_behind_a_graph_take_back_its_plain_draw(folders: dict[str, Path], family: str) -> None:
    """Some of the requests ask for penalties, biases or bans."""
    seed = SEEDS.get(family, (1,))[0]
    want = plain(folders[family], seed)
    answers = {tuple(input.prompt_ids): want.tokens[input.request_id] for input in requests(seed)}
    got, stats = play(folders[family], seed, DEEP, partial(Oracle, answers, 0.7), capture=DrawingRecorder())
    same(got, want)
    assert stats.accepted_tokens > 20


def test_a_plan_with_drafts_is_padded_by_dummy_entries() -> None:
    graphs = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 512, 256, max_drafts=5)

    def plan(*counts: int) -> StepPlan:
        drafts = {i: Draft(count - 1, 5, [0]) for i, count in enumerate(counts) if count > 1}
        return StepPlan(0, [*range(len(counts))], [4] * len(counts), [*counts], [True] * len(counts), drafts=drafts)

    assert graphs.fit(plan(5)) == StepShape(2, 6, 0, 6, 256, drafts=5, drafting=1)
    assert graphs.fit(plan(3, 6, 2)) == StepShape(8, 24, 0, 6, 256, drafts=5, drafting=4)
    assert graphs.fit(plan(1, 2, 2, 2)) == StepShape(8 + 8, 8 + 8, 8, 2, 256, drafts=1, drafting=4)
    beside_a_prompt = replace(plan(1, 3, 3), drafts={1: Draft(2, 5, [0])})
    assert graphs.fit(beside_a_prompt) is None
    assert graphs.fit(plan(7)) is None, "deeper than was said"
    few = StepGraphs(lambda shape: pytest.fail("computed"), Recorder(), 12, 16, 256, max_drafts=5)
    assert few.fit(plan(*[6] * 3)) is None, "more tokens than are staged"
    for shape in graphs._drafting:
        assert shape.entries - shape.num_single == 2 * (shape.tokens - shape.num_single) / (1 + shape.drafts)


def test_graphs_of_drafts_are_made_ahead_of_their_use() -> None:
    outcome = ComputedStep(
        DecodedStep(torch.zeros(1), torch.zeros(1)), torch.zeros(1, 1), lambda: Drawn(torch.zeros(1))
    )
    made = StepGraphs(lambda shape: outcome, Recorder(), 4, 64, 256, max_drafts=3)
    assert {shape for shape in made.first_shapes if shape.drafts} == {
        StepShape.drafted(0, entries, 3, 256) for entries in (1, 2, 4)
    }
    assert not made.drafts_ready(0, 4, 3)
    while (shape := made.next_shape) is not None:
        made.run(shape)
    assert not made.drafts_ready(0, 5, 3), "no such step has a graph"
    for singles in range(4):
        for entries in range(1, 5 - singles):
            for depth in (1, 2, 3):
                counts = [1] * singles + [1 + depth] * entries
                drafts = {singles + i: Draft(depth, 5, [0]) for i in range(entries)}
                rows = singles + entries
                fit = made.fit(StepPlan(0, [*range(rows)], [4] * rows, counts, [True] * rows, drafts=drafts))
                assert fit in made._replays
                assert made.drafts_ready(singles, entries, depth)


def test_drafts_change_no_token_of_batch_invariant_arithmetic(folders: dict[str, Path]) -> None:
    folder = folders["experts"]
    want, _ = play(folder, 1, SpeculationConfig(), dtype="bfloat16")
    answers = {tuple(input.prompt_ids): want.tokens[input.request_id] for input in requests(1)}
    got, stats = play(folder, 1, NGRAM, partial(Oracle, answers, 0.7), dtype="bfloat16")
    same(got, want)
    assert stats.accepted_tokens > 20


def test_what_repeats_itself_takes_fewer_steps(folders: dict[str, Path]) -> None:
    """A tiny model that is rewarded for it soon does nothing else."""
    steps = {}
    for speculation in (SpeculationConfig(), NGRAM):
        config = EngineConfig(
            model=str(folders["dense"]),
            load_format="dummy",
            cache=CacheConfig(num_blocks=40),
            runtime=RuntimeConfig(device="cpu", dtype="float32", overlap=False),
            speculation=speculation,
        )
        engine, heard = Engine(build_runner(config), config), Heard()
        params = SamplingParams(max_tokens=200, temperature=0.0, frequency_penalty=-2.0, ignore_eos=True)
        engine.submit(RequestInput(request_id="a", prompt_ids=[9, 10, 11], params=params), heard)
        inflight, count = None, 0
        while engine.loop.live:
            inflight, count = engine.loop.iterate(inflight), count + 1
        steps[speculation.method] = (count, heard.tokens["a"])
    assert steps["ngram"][1] == steps["none"][1]
    assert steps["ngram"][0] < 0.4 * steps["none"][0]


def test_what_was_said_before_takes_fewer_steps(folders: dict[str, Path]) -> None:
    config = EngineConfig(
        model=str(folders["dense"]),
        load_format="dummy",
        cache=CacheConfig(num_blocks=40),
        runtime=RuntimeConfig(device="cpu", dtype="float32", overlap=False),
        speculation=SpeculationConfig(method="suffix", tokens=4),
    )
    engine, heard, steps = Engine(build_runner(config), config), Heard(), []
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=4, ignore_eos=True)
    for name in "abc":
        engine.submit(RequestInput(request_id=name, prompt_ids=[9, 10, 11], params=params), heard)
        inflight, count = None, 0
        while engine.loop.live:
            inflight, count = engine.loop.iterate(inflight), count + 1
        steps.append(count)
    assert heard.tokens["a"] == heard.tokens["b"] == heard.tokens["c"]
    assert steps[2] < 0.5 * steps[0]


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_each_drafted_position_has_the_edits_of_its_length(folders: dict[str, Path], padded: bool) -> None:
    """Tokens that would end the request are banned up to the third; one word's end is, behind its beginning alone."""
    heard = []
    for speculation in (SpeculationConfig(), DEEP):
        config = EngineConfig(
            model=str(folders["dense"]),
            load_format="dummy",
            cache=CacheConfig(num_blocks=40),
            runtime=RuntimeConfig(device="cpu", dtype="float32", overlap=False),
            speculation=speculation,
        )
        answers = {(9, 10, 11): heard[0].tokens["a"]} if heard else {}
        drafter = partial(Oracle, answers, 1.0) if heard else None
        runner = build_runner(config)
        if padded:
            runner.use_graphs(Recorder())
        engine, now = Engine(runner, config, drafter=drafter, draft_tokens=speculation.most), Heard()
        ends = tuple(range(8, 264, 2))
        params = SamplingParams(
            max_tokens=40, min_tokens=3, temperature=0.9, seed=2, stop_token_ids=ends, logit_bias={31: 3.0}
        )
        engine.submit(RequestInput(request_id="a", prompt_ids=[9, 10, 11], params=params, bad_word_ids=[[31, 31]]), now)
        inflight = None
        while engine.loop.live:
            inflight = engine.loop.iterate(inflight)
        heard.append(now)
    same(heard[1], heard[0])
    tokens = heard[0].tokens["a"]
    assert len(tokens) >= 3
    assert not set(tokens[:3]) & set(ends)
    assert (31, 31) not in pairwise(tokens)
    assert engine.stats().accepted_tokens >= 2


def test_the_step_that_memory_is_measured_by_draws_behind_every_draft(folders: dict[str, Path]) -> None:
    scheduler = SchedulerConfig(max_rows=4, token_budget=40)
    config = EngineConfig(
        model=str(folders["dense"]),
        load_format="dummy",
        scheduler=scheduler,
        runtime=RuntimeConfig(device="cpu"),
        speculation=NGRAM,
    )
    plan = largest_step(scheduler, 256, NGRAM.most)
    assert (plan.num_tokens, [draft.count for draft in plan.drafts.values()]) == (16, [3] * 4)
    assert len(build_runner(config).launch(plan).wait().logprobs) == 4
    few = largest_step(SchedulerConfig(max_rows=4, token_budget=9), 256, NGRAM.most)
    assert (few.num_tokens, few.count, list(few.drafts)) == (9, [4, 1, 1, 3], [0])


def test_settings_that_cannot_be_honoured_are_refused_with_a_sentence(tmp_path: Path) -> None:
    for settings, sentence in (
        ({"speculation.method": "medusa"}, "it is none, ngram, suffix, draft, eagle3"),
        ({"speculation.tokens": "3"}, "speculation.method is none"),
        ({"speculation.method": "ngram", "speculation.tokens": "some"}, "tokens"),
        ({"speculation.method": "ngram", "speculation.tokens": "17"}, "a whole number from 1 to 16 or auto"),
        ({"speculation.method": "draft"}, "needs speculation.model"),
        ({"speculation.method": "eagle3"}, "needs speculation.model"),
        ({"speculation.method": "ngram", "speculation.model": "."}, "is for the methods draft and eagle3"),
        ({"speculation.method": "draft", "speculation.model": "nowhere"}, "no checkpoint folder"),
        ({"speculation.method": "mtp", "speculation.quantize": "fp8"}, "speculation.method mtp has none: leave it out"),
        ({"speculation.method": "draft", "speculation.quantize": "int5"}, "speculation.quantize"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            parse({"model": str(tmp_path), **settings}, tmp_path)
    made = parse({"model": str(tmp_path), "speculation.method": "ngram", "speculation.tokens": "7"}, tmp_path)
    assert made.engine.speculation.most == 7
    made = parse({"model": str(tmp_path), "speculation.method": "ngram", "speculation.tokens": "auto"}, tmp_path)
    assert (made.engine.speculation.tokens, made.engine.speculation.most) == ("auto", 7)
