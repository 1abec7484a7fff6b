"""The processes of a group: what one cannot do ends all, with its sentence, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from engine.models.reader import ConfigError
from engine.parallel.group import Group, RankError
from tests.gate.families import QWEN3_MOE
from tests.gate.oracle import random_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    random_model(QWEN3_MOE).save_pretrained(folder)
    return EngineConfig(
        model=str(folder),
        max_model_len=200,
        scheduler=SchedulerConfig(max_rows=4, token_budget=64),
        cache=CacheConfig(num_blocks=32),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
        parallel=ParallelConfig(tensor=2),
    )


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_dies_while_it_loads_is_named(config: EngineConfig) -> None:
    group = Group(config)
    (pid,) = group.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=rf"rank 1 \(pid {pid}\) was killed by SIGKILL"):
        group.lead(None, None)
    assert ended([pid])


def test_a_model_that_cannot_be_shared_is_refused_by_name(config: EngineConfig, tmp_path: Path) -> None:
    values = json.loads((Path(config.model) / "config.json").read_text())
    values["moe_intermediate_size"] = 1
    (tmp_path / "config.json").write_text(json.dumps(values))
    for file in Path(config.model).glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    with pytest.raises((ConfigError, RankError), match="a feed-forward part of 1 channels"):
        Engine.from_config(msgspec.structs.replace(config, model=str(tmp_path)))
