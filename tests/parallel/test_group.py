"""The processes of a group: what one cannot do ends all, with its sentence, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from engine.models.reader import ConfigError
from engine.parallel import commands, remote_host
from engine.parallel.commands import Close
from engine.parallel.group import Group, RankError
from engine.parallel.placement import Placement
from engine.parallel.remote_host import HostError
from tests.e2e.harness import free_ports, wait_until
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
        parallel=ParallelConfig(tensor=2, expert="sliced"),
    )


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_dies_while_it_loads_is_named(config: EngineConfig) -> None:
    group = Group(config)
    (pid,) = group.pids
    os.kill(pid, signal.SIGRTMIN + 1)  # which has no name
    with pytest.raises(RankError, match=rf"rank 1 \(pid {pid}\) was killed by signal {signal.SIGRTMIN + 1}"):
        group.lead(None, None)
    assert ended([pid])


def test_a_rank_that_was_told_to_end_is_no_fault(config: EngineConfig) -> None:
    """However long the first one takes to end itself. SIGTERM tells a rank nothing: all processes of a service get it
    at once, and the first decides."""
    group = Group(config)
    runner = group.lead(None, None)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(group.pids[0], number)
    runner._send(commands.encode(Close()))
    wait_until(lambda: ended(group.pids), "the other rank has ended")
    runner.close()
    assert group.lost() is None


def test_a_model_that_cannot_be_shared_is_refused_by_name(config: EngineConfig, tmp_path: Path) -> None:
    folder = narrow(config, tmp_path)
    with pytest.raises((ConfigError, RankError), match="a feed-forward part of 1 channels"):
        Engine.from_config(msgspec.structs.replace(config, model=str(folder)))


def narrow(config: EngineConfig, folder: Path) -> Path:
    """The model with experts of one channel, which go into no two ranks."""
    values = json.loads((Path(config.model) / "config.json").read_text())
    values["moe_intermediate_size"] = 1
    (folder / "config.json").write_text(json.dumps(values))
    for file in Path(config.model).glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def two_hosts() -> Placement:
    return Placement(0, 2, 0, "127.0.0.1", *free_ports(1))


def test_all_hosts_end_when_the_model_cannot_be_shared(
    config: EngineConfig, two_hosts: Placement, tmp_path: Path
) -> None:
    """Both ranks say so; which is heard first decides the words alone."""
    folder = narrow(config, tmp_path)
    group = Group(msgspec.structs.replace(config, model=str(folder)), two_hosts)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(remote_host.serve, Placement(1, 2, 0, "127.0.0.1", two_hosts.port), None, 30.0)
        with pytest.raises((ConfigError, RankError), match="a feed-forward part of 1 channels"):
            group.lead(None, None)
        with pytest.raises(HostError, match=r"the first host cannot serve the model: .*a feed-forward part of 1 chan"):
            other.result(60)
