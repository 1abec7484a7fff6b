"""A model on two ranks behind a real server: they live and die together, and streams go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.serving.launch import repository
from engine.serving.link.process_watch import parent, start_time
from perf.check import planted
from tests.e2e.conftest import SETTINGS
from tests.e2e.harness import Call, Server, tokens_of, wait_until
from tests.e2e.test_recovery import long_request
from tests.e2e.test_speculation import ASKED, SPECULATION, said

STREAMS, FEW = 6, 40
RANK = b"engine.parallel.worker"


@pytest.fixture(scope="module")
def pair(server: Server, models: Path, checkpoint: Path) -> Iterator[Server]:
    """The server, with a model `pair` on two ranks that compute drafts. A rank that stands still is given up soon."""
    ranks = {"parallel.tensor": "2", "parallel.hang_timeout_s": "3"}
    repository.write_llm(models, "pair", {"model": str(checkpoint), **SETTINGS, **SPECULATION, **ranks})
    assert server.load("pair") is None
    yield server
    server.unload("pair")


def ranks(server: Server) -> tuple[int, int]:
    """The processes of both ranks."""
    (first,) = server.engine_pids("pair")
    others = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _follows(entry) and parent(int(entry.name)) == first
    ]
    (second,) = others
    return first, second


def _follows(entry: Path) -> bool:
    try:
        return RANK in (entry / "cmdline").read_bytes()
    except OSError:
        return False


def streams(server: Server) -> list[Call]:
    return [Call(server, **long_request(seed, FEW), model="pair") for seed in range(STREAMS)]


@pytest.fixture(scope="module")
def failing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with `pair` alone, and the folder by which the library fails a rank."""
    folder = tmp_path_factory.mktemp("failing")
    repository.write_llm(folder / "models", "pair", {"model": str(checkpoint), **SETTINGS, "parallel.tensor": "2"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in planted.environment(folder).items():
            patch.setenv(name, value)
        server = Server(folder / "models", folder / "log", models=("pair",), exit_timeout_s=3)
    yield server.wait_ready(), folder
    assert server.stop() == 0


@pytest.fixture(scope="module")
def expected(pair: Server) -> list[list[int]]:
    """Of the same streams, undisturbed."""
    return [tokens_of(call.all()) for call in streams(pair)]


def test_streams_say_what_they_say_on_one_rank(pair: Server, expected: list[list[int]]) -> None:
    alone = [Call(pair, **long_request(seed, FEW)) for seed in range(STREAMS)]
    assert [tokens_of(call.all()) for call in alone] == expected
    held = {"structured_outputs": {"regex": "(yes|no), [a-z]{3,9}[.]"}, "ignore_eos": False, "seed": 5}
    for fields in (*ASKED, held):
        assert said(pair, "pair", fields) == said(pair, "demo", fields)
    wait_until(
        lambda: pair.metric("vllm:spec_decode_num_accepted_tokens_total", model="pair") > 0, "drafts stood", 10.0
    )


# That the first rank stands still is seen by its supervisor, as of any engine.
@pytest.mark.parametrize(
    ("rank", "number"),
    [pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow), (1, signal.SIGKILL), (1, signal.SIGSTOP)],
)
def test_streams_survive_the_end_of_either_rank(
    pair: Server, expected: list[list[int]], rank: int, number: signal.Signals
) -> None:
    """None of their tokens is lost, and none comes twice."""
    old = ranks(pair)
    calls = streams(pair)
    firsts = [call.next() for call in calls]
    os.kill(old[rank], number)
    got = [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)]
    assert got == expected
    wait_until(lambda: all(start_time(pid) is None for pid in old), "both old ranks are gone")
    assert not set(ranks(pair)) & set(old)
    if rank == 1:
        assert f"rank 1 (pid {old[1]})" in pair.log.read_text()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_streams_survive_an_error_of_the_library(
    failing: tuple[Server, Path], expected: list[list[int]], rank: int
) -> None:
    """In a step of either rank, while both live."""
    server, folder = failing
    old = ranks(server)
    calls = streams(server)
    firsts = [call.next() for call in calls]
    planted.plant(folder, rank)
    got = [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)]
    assert got == expected
    wait_until(lambda: all(start_time(pid) is None for pid in old), "both old ranks are gone")
    assert "unhandled system error (planted)" in server.log.read_text()
