"""Heads and smaller models that draft beside a model that two ranks share: each rank drafts what one alone does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import Engine
from engine.config import EngineConfig, ParallelConfig, SpeculationConfig
from engine.core.plan import StepPlan
from engine.parallel.communicator import Communicator
from engine.runner.build import build_runner
from engine.runner.draft_head import HeadDrafter
from engine.runner.draft_model import DraftModel
from engine.runner.runner import DeviceRunner
from tests.parallel.ranks import together, with_engine
from tests.runner import eagle3_heads as heads
from tests.runner import test_eagle3, test_mtp
from tests.runner.proposals import Proposals, prompts, run
from tests.runner.test_drafts import Heard, same


def with_module(family: str, folder: Path) -> EngineConfig:
    return test_mtp.config_for(test_mtp.module(family, own=True).write(folder), overlap=False, blocks=60)


def with_head(folder: Path) -> EngineConfig:
    # One key-value head, which every rank holds: the cache's groups are the same on one rank and two.
    test_eagle3.model(folder, 0.5, groups=1)
    held = heads.tensors(heads.PUBLISHED, own_embedding=False)
    head = heads.write(folder / "head", heads.PUBLISHED, held)
    return test_eagle3.config_for(folder, head, overlap=False)


def with_model(folder: Path) -> EngineConfig:
    """The model drafts for itself, whole on every rank."""
    config = with_head(folder)
    return replace(config, speculation=replace(config.speculation, method="draft", model=str(folder)))


def drafter_of(runner: DeviceRunner) -> HeadDrafter | DraftModel:
    drafter = runner._draft_head or runner._draft_model
    assert drafter is not None
    return drafter


SLICED, WHOLE = ParallelConfig(tensor=2), ParallelConfig(tensor=2, expert="whole")
# The last: requests. Drafts that all stand take fewer steps.
MADE = [
    pytest.param(partial(with_module, "deepseek-v3"), SLICED, 3, id="deepseek-v3", marks=pytest.mark.slow),
    pytest.param(partial(with_module, "qwen3.5"), SLICED, 3, id="qwen3.5"),
    pytest.param(partial(with_module, "deepseek-v4"), SLICED, 3, id="deepseek-v4", marks=pytest.mark.slow),
    pytest.param(partial(with_module, "deepseek-v3"), WHOLE, 3, id="deepseek-v3-whole-experts"),
    pytest.param(with_head, SLICED, 3, id="eagle3"),
    pytest.param(with_model, SLICED, 8, id="a smaller model"),
]


@pytest.mark.parametrize(("made", "parallel", "count"), MADE)
def test_two_ranks_draft_what_one_does(
    tmp_path: Path, made: Callable[[Path], EngineConfig], parallel: ParallelConfig, count: int
) -> None:
    config = made(tmp_path)
    runner = build_runner(config)
    alone, plans, launch = Proposals(drafter_of(runner)), [], runner.launch

    def recorded(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    runner.launch = recorded  # type: ignore[method-assign]
    run(Engine(runner, config), prompts(count, temperature=0.0))

    def work(communicator: Communicator) -> list[tuple[list[int], list[int]]]:
        runner = build_runner(replace(config, parallel=parallel), communicator=communicator)
        proposals = Proposals(drafter_of(runner))
        for plan in plans:
            runner.launch(plan).wait()
        return proposals.seen

    seen = together(2, work)
    assert len(alone.seen) > 40
    assert seen[0] == seen[1] == alone.seen


def test_a_smaller_model_changes_no_token_of_ranks_that_share_its_heads_out(tmp_path: Path) -> None:
    """The cache's groups are others than on one rank: the model's are of one head, the drafter's of two."""
    test_eagle3.model(tmp_path, 0.5, groups=2)
    config = test_eagle3.config_for(tmp_path, tmp_path, blocks=120)
    drafted = replace(config, speculation=SpeculationConfig(method="draft", model=str(tmp_path), tokens=3))
    asked = prompts(6, temperature=0.0) + prompts(4, first=6, temperature=0.7)
    plain = replace(config, speculation=SpeculationConfig())
    want = run(Engine(build_runner(plain), plain), asked)

    def use(engine: Engine) -> tuple[Heard, int]:
        return run(engine, asked), engine.stats().accepted_tokens

    heard, accepted = with_engine(replace(drafted, parallel=SLICED), use)
    same(heard, want)
    assert accepted > 100
