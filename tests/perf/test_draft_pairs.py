"""A model and its head draw the same tokens as often as was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.runner.build import build_runner
from engine.types import RequestInput, SamplingParams
from perf import draft_pairs, shapes
from tests.runner.proposals import run

SMALL = {"hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 4096, "tie_word_embeddings": False}


def answers(model: Path, head: Path | None) -> tuple[dict[str, list[int]], float]:
    """Tokens of a few requests at temperature 1, and the part of single drafts that stood."""
    speculation = SpeculationConfig(method="eagle3", model=str(head), tokens=1) if head else SpeculationConfig()
    config = EngineConfig(
        model=str(model),
        max_model_len=256,
        scheduler=SchedulerConfig(max_rows=4, token_budget=64),
        cache=CacheConfig(num_blocks=80),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
        speculation=speculation,
    )
    runner = build_runner(config)
    engine = Engine(runner, config)
    asked = [
        RequestInput(
            request_id=str(i),
            prompt_ids=[100 + i],
            params=SamplingParams(max_tokens=150, temperature=1.0, seed=i, ignore_eos=True),
        )
        for i in range(4)
    ]
    heard, stats = run(engine, asked), engine.stats()
    runner.close()
    return heard.tokens, stats.accepted_tokens / max(1, stats.draft_tokens)


@pytest.mark.parametrize(
    ("acceptance", "low", "high"),
    [
        (0.75, 0.68, 0.82),
        pytest.param(1.0, 1.0, 1.0, marks=pytest.mark.slow),
        pytest.param(0.0, 0.0, 0.02, marks=pytest.mark.slow),
    ],
)
def test_drafts_stand_as_often_as_was_asked(tmp_path: Path, acceptance: float, low: float, high: float) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({**shapes.SHAPES["tiny"], **SMALL}))
    model, head = draft_pairs.write(tmp_path / "made", str(shape), [acceptance], drafts=2100)
    plain, _ = answers(model, None)
    drafted, stood = answers(model, head)
    assert drafted == plain
    assert low <= stood <= high


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no head of its own"):
        draft_pairs.write(tmp_path, "tiny", [0.5])
    with pytest.raises(ValueError, match="--drafts 4000 to 151936"):
        draft_pairs.write(tmp_path, "qwen3-8b", [0.5], drafts=100)


def test_two_rows_of_logits_agree_by_what_they_share() -> None:
    first = torch.tensor([0.0, 0.0, -50.0])
    assert draft_pairs.agreement(first, first) == pytest.approx(1.0)
    assert draft_pairs.agreement(first, torch.tensor([0.0, -50.0, -50.0])) == pytest.approx(0.5)
    assert draft_pairs.agreement(torch.tensor([0.0, -50.0]), torch.tensor([-50.0, 0.0])) == pytest.approx(0.0, abs=1e-9)
