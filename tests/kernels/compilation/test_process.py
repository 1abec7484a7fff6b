"""Kernels compiled in other processes are the ones that this process would compile, and it can do without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from engine import env
from kernels.compilation import process as compile_process
from kernels.compilation.process import CompileProcess
from tests.compiled import environment
from tests.kernels.compilation.driver import outlive, running


def play(scenario: str, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kernels.compilation.driver", scenario]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is compiled without a helper."""
    return play("none", tmp_path_factory.mktemp("threads"))


@pytest.mark.slow
def test_everything_is_compiled_by_the_helper_and_found_in_the_cache(tmp_path: Path, threads: dict[str, Any]) -> None:
    assert len(threads["kernels"]) >= 8
    assert {"_choose", "stream_kernel"} <= set(threads["kernels"])  # one that calls others, one of Gluon's
    assert sorted(threads["here"]) == threads["kernels"]
    found = play("helper", tmp_path)
    assert found == {"kernels": threads["kernels"], "here": [], "failed": 0, "left": []}


@pytest.mark.slow
def test_a_full_cache_asks_the_helper_for_nothing_and_serves_both_ways(tmp_path: Path) -> None:
    play("helper", tmp_path)
    for scenario in ("none", "helper"):
        assert play(scenario, tmp_path)["here"] == []


@pytest.mark.slow
def test_a_killed_child_costs_its_kernel_alone(tmp_path: Path, threads: dict[str, Any]) -> None:
    found = play("child-killed", tmp_path)
    assert found["kernels"] == threads["kernels"]
    assert found["failed"] == 1
    assert len(found["here"]) <= 1  # its machine code may have stood in the cache already
    assert found["left"] == []


@pytest.mark.slow
def test_without_the_helper_the_rest_is_compiled_here(tmp_path: Path, threads: dict[str, Any]) -> None:
    found = play("helper-killed", tmp_path)
    assert found["kernels"] == threads["kernels"]
    assert found["failed"] > 1
    assert len(found["here"]) >= found["failed"] - 4  # of those under way some may have stood in the cache
    assert found["left"] == []


@pytest.mark.slow
def test_the_helper_and_its_children_end_with_the_engines_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.compilation.driver", "abandoned"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(tmp_path)) as engine:
        assert engine.stdout is not None
        pids = json.loads(engine.stdout.readline())
        assert len(pids) > 1
        engine.kill()
    assert outlive(pids) == [], "the helper outlives the process that started it"


@pytest.mark.slow
def test_names_in_the_cache_do_not_hang_on_the_order_of_launches(tmp_path: Path) -> None:
    program = """
import importlib, sys
from kernels.compilation.variant import hash_functions
names = sys.argv[1:]
modules = [importlib.import_module(f"kernels.{name}") for name in names]
for module in modules:
    hash_functions(module.__name__)
found = [(f"{m.__name__}.{n}", v) for m in modules for n, v in vars(m).items() if hasattr(v, "cache_key")]
print(sorted((name, function.cache_key) for name, function in found))
"""
    names = [f"{name}.kernel" for name in ("sample", "logprobs", "paged_attention", "moe_route")]
    names += ["linear.gated_persistent", "latent_attention.prompt", "moe_gemm.grouped"]
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, *order],
            capture_output=True,
            text=True,
            check=True,
            env=environment(tmp_path),
        ).stdout
        for order in (names, names[::-1])
    ]
    assert printed[0] == printed[1]
    assert "_choose" in printed[0]


@pytest.fixture
def process() -> Iterator[CompileProcess]:
    process = CompileProcess(env.inherited())
    yield process
    process.close()


def test_what_is_no_kernel_is_refused_and_the_helper_goes_on(process: CompileProcess) -> None:
    assert not process.compile(b"nonsense")
    assert not process.compile(b"")
    assert running(process.pid)


def test_a_closed_helper_compiles_nothing() -> None:
    process = CompileProcess(env.inherited())
    process.close()
    assert not process.compile(b"")
    assert not running(process.pid)


def test_waiting_threads_hear_of_the_helpers_death(process: CompileProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert not process.compile(b"")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that seems to have one."""
    monkeypatch.setattr(compile_process, "_DEVICE", tmp_path)
    monkeypatch.setattr(compile_process, "_hash_triton", lambda: None)


@pytest.mark.parametrize(
    ("gpu_wanted", "processes"), [(True, False), (False, True)], ids=["in threads or not at all", "on a CPU"]
)
@pytest.mark.usefixtures("gpu")
def test_no_helper_is_started_in_vain(gpu_wanted: bool, processes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_process, "CompileProcess", None)
    with compile_process.helper(gpu_wanted, processes, env.inherited()) as compile_elsewhere:
        assert compile_elsewhere is None


def test_no_helper_is_started_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_process, "_DEVICE", tmp_path / "nothing")
    with compile_process.helper(True, True, env.inherited()) as compile_elsewhere:
        assert compile_elsewhere is None


@pytest.mark.usefixtures("gpu")
def test_an_engine_starts_where_no_helper_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with compile_process.helper(True, True, env.inherited()) as compile_elsewhere:
        assert compile_elsewhere is None


@pytest.mark.usefixtures("gpu")
def test_the_helper_lives_as_long_as_the_block() -> None:
    with compile_process.helper(True, True, env.inherited()) as compile_elsewhere:
        assert compile_elsewhere is not None
        pid = compile_elsewhere.__self__.pid  # type: ignore[attr-defined]
        assert running(pid)
    assert not running(pid)
