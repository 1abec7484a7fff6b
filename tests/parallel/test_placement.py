"""What launchers say of a process's place, and what is refused of it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from engine import env
from engine.api import Engine
from engine.config import EngineConfig, ParallelConfig
from engine.parallel.group import Group
from engine.parallel.placement import ALONE, Placement, PlacementError, placed
from engine.serving.launch.cli import app

TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
POD = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


def of(variables: dict[str, str]) -> Placement:
    return placed(env.read(variables).launched)


def test_the_names_of_torchrun() -> None:
    assert of(TORCHRUN) == Placement(5, 8, 1, "10.0.0.1", 29501)


def test_torchrun_itself_listens_at_its_port() -> None:
    assert of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).port == 29502
    assert of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).port == 29501


def test_the_names_of_a_leader_worker_set() -> None:
    assert of(POD) == Placement(1, 2, 0, "llm-0.llm.default", 29500)
    assert of({**POD, "MASTER_PORT": "7000"}).port == 7000


def test_torchrun_in_a_pod_says_more_than_the_pod() -> None:
    assert of({**POD, **TORCHRUN}) == of(TORCHRUN)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "5", "LOCAL_RANK": "x"},  # 1 is how ranks are kept here, whatever else is said
        {**POD, "LWS_GROUP_SIZE": "1"},
        {"RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "", "LOCAL_RANK": ""},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "none", "LOCAL_WORLD_SIZE": "8"},  # there is nobody to meet
    ],
)
def test_one_process_is_alone(variables: dict[str, str]) -> None:
    assert of(variables) == ALONE


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR is 'a..b': it is no address and no name of a host"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 8 and MASTER_ADDR is not set"),
        ({"RANK": ""}, "RANK is not set: give each process its number, 0 to 7"),
        ({"RANK": "8"}, "RANK is '8': it must be a number from 0 to 7"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many': it must be a number from 1 to 64"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9+"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is '4': it must be a number from 0 to 3"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"RANK": "0"}, "RANK is 0 and LOCAL_RANK 1"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(PlacementError, match=sentence) as refused:
        of({**TORCHRUN, **changes})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["1", "-1", "first"])
def test_a_number_among_processes_that_are_not_counted_is_refused(name: str, value: str) -> None:
    with pytest.raises(
        PlacementError, match=f"{name} is '{value}' and WORLD_SIZE is not set: set WORLD_SIZE to .* or to 1"
    ):
        of({name: value})


def test_ranks_are_shared_out_evenly() -> None:
    placement = Placement(host=1, hosts=2)
    assert [placement.ranks(8, host) for host in range(2)] == [range(4), range(4, 8)]
    assert placement.ranks(2) == range(1, 2)
    assert ALONE.ranks(3) == range(3)


@pytest.mark.parametrize("tensor", [1, 3])
def test_ranks_that_do_not_go_into_the_hosts_are_refused(tensor: int) -> None:
    launched = env.read(
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ).launched
    config = EngineConfig(model="/nonexistent", parallel=ParallelConfig(tensor=tensor))
    with pytest.raises(PlacementError, match=f"WORLD_SIZE is 2 and parallel.tensor {tensor}: .* a multiple of it"):
        Engine.from_config(config, launched=launched)


def test_the_engine_runs_on_the_first_host_alone() -> None:
    config = EngineConfig(model="/nonexistent", parallel=ParallelConfig(tensor=2))
    with pytest.raises(PlacementError, match="RANK is 1, and the engine runs with RANK 0 alone: start `nereid rank`"):
        Group(config, Placement(1, 2))


@pytest.mark.parametrize("command", ["rank", "serve"])
def test_the_command_refuses_with_a_sentence(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 1
    assert "MASTER_ADDR is not set" in done.output


def test_processes_of_a_host_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind those of others, unless a launcher shows each process its own alone."""
    monkeypatch.delenv(env.GPUS, raising=False)
    assert env.one_gpu(1, taken=2, own=2) == {env.GPUS: "3"}
    monkeypatch.setenv(env.GPUS, "4,5,6,7")
    assert env.one_gpu(1, taken=2, own=2) == {env.GPUS: "7"}
    assert env.one_gpu(1, taken=4, own=2) == {env.GPUS: ""}
    monkeypatch.setenv(env.GPUS, "6,7")
    assert env.one_gpu(1, taken=2, own=2) == {env.GPUS: "7"}
