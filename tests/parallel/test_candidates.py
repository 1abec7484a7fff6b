"""Ranks that tell each other candidates draw the tokens that they draw from whole logits, whatever requests ask for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.core.commit import InFlight
from engine.core.plan import RowStart
from engine.parallel.communicator import ALONE, Communicator
from engine.parallel.vocabulary import Vocabulary
from engine.runner.runner import DeviceRunner
from engine.sampling.logits import EDIT_IDS, EntryEdits, RowEdits
from engine.sampling.params import NUM_LONG, NUM_PARAMS, RowParams, long_words, param_words
from engine.sampling.sampler import Drawn, EntryMasks, Sampler, SamplingExtras
from engine.types import SamplingParams
from kernels.registry import registry
from kernels.select import select
from kernels.testing import bound
from kernels.workspace import Workspace
from tests.parallel.ranks import together, with_engine
from tests.runner.test_drafts import Heard, requests
from tests.runner.test_graphs import Recorder
from tests.runner.tiny import CONFIG

SIZES = (2, 3)
PLAYED = (2, pytest.param(3, marks=pytest.mark.slow))
VOCAB, ROWS, HELD = 1531, 10, 12
OPS = select(Workspace(torch.device("cpu")))


def asked(draw: random.Random, seed: int, whole: bool) -> SamplingParams:
    """Any request, for most of which candidates are enough unless `whole`."""
    extras: dict[str, Any] = {
        "repetition_penalty": draw.uniform(1.01, 1.8),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-1, 1),
        "logit_bias": {draw.randrange(VOCAB): draw.uniform(-100, 100) for _ in range(5)},
        "allowed_token_ids": tuple(draw.sample(range(VOCAB), draw.choice((1, 9)))),
        "min_tokens": draw.randint(0, 9),
        "stop_token_ids": tuple(draw.sample(range(VOCAB), 20)),
    }
    made = {name: value for name, value in extras.items() if draw.random() < 0.3}
    made["temperature"] = draw.choice((0.0, 0.5, 1.0, 3.0))
    if whole or draw.random() < 0.6:
        made["top_k"] = draw.choice((0, 65, 200)) if whole else draw.choice((1, 7, 64))
        made |= {"top_p": draw.uniform(0.3, 0.999), "min_p": draw.choice((0.0, 0.05))}
    return SamplingParams(seed=seed, max_tokens=20, **made)


class Drawing:
    """A step's logits and what its rows ask for, drawn by as many ranks as there are."""

    def __init__(self, seed: int, whole: bool = False) -> None:
        draw = random.Random(seed)
        self.params = [asked(draw, seed + i, whole) for i in range(ROWS)]
        self.logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        self.tokens = torch.tensor([[draw.randrange(VOCAB) for _ in range(HELD)] for _ in range(ROWS)]).int()
        # Words of two tokens, of which some end what is held.
        words = [[(int(row[-1]), draw.randrange(VOCAB)) for _ in range(40)] for row in self.tokens]
        self.starts = [
            RowStart(i, self.tokens[i].tolist(), HELD - 3, of, (7,), tuple(words[i]) if i % 3 == 0 else ())
            for i, of in enumerate(self.params)
        ]
        bits = np.random.default_rng(seed).integers(-(2**31), 2**31, (4, -(-VOCAB // 32)))
        self.masks = EntryMasks(torch.tensor([1, 2, 5, 8], dtype=torch.int32), torch.from_numpy(bits.astype(np.int32)))

    def drawn(self, ops: Any, communicator: Communicator, merges: bool = True, beside: int = 0) -> Drawn:
        """beside: how far another rank than the first mistakes the place of its tokens."""
        vocabulary = Vocabulary(VOCAB, communicator, merges)
        own = self.logits[:, vocabulary.start : vocabulary.start + vocabulary.count]
        vocabulary.start += beside * communicator.rank
        words = torch.from_numpy(np.stack([param_words(start) for start in self.starts], axis=1))
        longs = np.stack([long_words(start) for start in self.starts], axis=1)
        params = RowParams.of(
            words.reshape(NUM_PARAMS, ROWS), torch.from_numpy(longs).view(torch.int64).view(NUM_LONG, ROWS)
        )
        edits = []
        for i, start in enumerate(self.starts):
            row = RowEdits(start, torch.zeros(EDIT_IDS, dtype=torch.int64), vocabulary)
            if row.touch(HELD):
                edits.append(EntryEdits(i, HELD, row, self.tokens[i]))
        extras = SamplingExtras(edits, True, 5, self.masks)
        sampler = Sampler(ops, vocabulary)
        whole = any(map(sampler.needs_whole_logits, self.params))
        rows, lengths = torch.arange(ROWS).int(), torch.full((ROWS,), HELD).int()
        return sampler.draw(own, params, rows, lengths, self.tokens, extras, whole)


def same(got: Drawn, want: Drawn) -> None:
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.logprobs is not None
    assert want.logprobs is not None
    for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", PLAYED)
@pytest.mark.parametrize("whole", [False, True], ids=["candidates", "whole"])
def test_ranks_draw_what_one_draws(size: int, whole: bool) -> None:
    for seed in range(12):
        drawing = Drawing(100 * seed, whole)
        want = drawing.drawn(OPS, ALONE)
        for merges in (True, False):
            for got in together(size, partial(drawing.drawn, OPS, merges=merges)):
                same(got, want)


def test_a_rank_that_takes_its_tokens_for_others_is_caught() -> None:
    drawing = Drawing(0)
    want = drawing.drawn(OPS, ALONE)
    got = together(2, partial(drawing.drawn, OPS, beside=1))
    assert got[0].tokens.tolist() == got[1].tokens.tolist() != want.tokens.tolist()


def test_kernels_of_ranks_draw_what_one_draws() -> None:
    """Every kernel between logits and tokens, on parts of a vocabulary; ranks in turn, since the interpreter runs one
    program of a process at a time."""
    ops = type("Kernels", (), {op.name: staticmethod(bound(op)) for op in registry()})
    drawing = Drawing(7)
    want = drawing.drawn(OPS, ALONE)
    told: list[torch.Tensor] = []

    class InTurn(Communicator):
        """Hears what ranks before it said; the last draws."""

        size = 3

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.int32:
                told.append(x)
            return torch.stack([*told, *[x] * (3 - len(told))]) if x.dtype == torch.int32 else torch.stack([x] * 3)

    for rank in range(3):
        got = drawing.drawn(ops, InTurn(rank))
    assert got.tokens.tolist() == want.tokens.tolist()


@pytest.mark.parametrize(
    ("params", "whole"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.9, "min_p": 0.1}, False),
        ({"temperature": 1.0, "top_k": 5000}, False),
        ({"temperature": 1.0, "top_k": 65}, True),
        ({"temperature": 1.0, "top_p": 0.9}, True),
        ({"temperature": 1.0, "min_p": 0.1}, True),
        ({"temperature": 1.0, "top_k": 5000, "top_p": 0.9}, True),
    ],
    ids=str,
)
def test_what_candidates_say_enough_for(params: dict[str, Any], whole: bool) -> None:
    pair = type("Pair", (Communicator,), {"size": 2})()
    of = SamplingParams(seed=1, **params)
    assert Sampler(OPS, Vocabulary(VOCAB, pair)).needs_whole_logits(of) is whole
    assert not Sampler(OPS, Vocabulary(VOCAB, pair, merges=False)).needs_whole_logits(of)
    assert not Sampler(OPS, Vocabulary(VOCAB, ALONE)).needs_whole_logits(of)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "vocab_size": VOCAB, "hidden_size": 96, "num_attention_heads": 6})
    )
    return folder


def play(checkpoint: Path, size: int, merge: bool, method: str) -> tuple[Heard, list[torch.Size], Recorder]:
    """What requests of all kinds hear from `size` ranks, what of the first rank's logits was put together, and what
    was captured on it."""
    config = EngineConfig(
        model=str(checkpoint),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=6, token_budget=128),
        cache=CacheConfig(num_blocks=40),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
        speculation=SpeculationConfig(method=method, tokens=3) if method != "none" else SpeculationConfig(),
        parallel=ParallelConfig(tensor=size, merge_candidates=merge),
    )
    gathered: list[torch.Size] = []
    recorders = [Recorder() for _ in range(size)]

    def prepare(runner: DeviceRunner) -> None:
        vocabulary: Any = runner.decoder.vocabulary
        runner.use_graphs(recorders[vocabulary._communicator.rank])
        if vocabulary.start == 0:
            whole: Callable[..., Any] = vocabulary.whole
            vocabulary.whole = lambda logits: (gathered.append(logits.shape), whole(logits))[1]

    def use(engine: Engine) -> Heard:
        heard, inflight = Heard(), None
        waiting = requests(3)
        while waiting or engine.loop.live or inflight is not None:
            if waiting:
                engine.submit(waiting.pop(), heard)
            inflight: InFlight | None = engine.loop.iterate(inflight)
        engine.check_integrity()
        return heard

    return with_engine(config, use, prepare), gathered, recorders[0]


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("size", PLAYED)
def test_the_switch_changes_no_token(checkpoint: Path, size: int, method: str) -> None:
    merged, few, recorder = play(checkpoint, size, True, method)
    gathered, many, _ = play(checkpoint, size, False, method)
    assert merged.tokens == gathered.tokens
    assert merged.said == gathered.said
    assert merged.ends == gathered.ends
    assert 0 < len(few) < len(many)
    drawn_whole = {shape.whole_logits for shape in recorder.captured}
    assert drawn_whole == {True, False}, "both kinds of steps have graphs"
