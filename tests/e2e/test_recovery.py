"""What happens when clients, frontends or the engine process go away."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from clients.python.cli import app
from engine.serving.launch import guard, repository
from engine.serving.launch.replacement import Replacement, Repository
from engine.serving.link.process_watch import start_time
from tests.e2e.conftest import SETTINGS
from tests.e2e.harness import Call, Server, text_of, tokens_of, wait_until

PROMPT = "A server takes a question and"
USED = "vllm:kv_cache_blocks_used"
RUNNING = "vllm:num_requests_running"


def long_request(seed: int, max_tokens: int = 400) -> dict[str, object]:
    fields = {"max_tokens": max_tokens, "temperature": 0.9, "seed": seed, "ignore_eos": True}
    return {"text_input": f"{PROMPT} {seed}", "stream": True, "sampling_parameters": json.dumps(fields)}


@pytest.fixture
def scaled(server: Server, models: Path, checkpoint: Path) -> Iterator[str]:
    """A model none of whose frontends has died: the server keeps what those held, and their instances with it."""
    repository.write_llm(models, "scaled", {"model": str(checkpoint), **SETTINGS})
    assert server.load("scaled") is None
    yield "scaled"
    server.unload("scaled")
    shutil.rmtree(models / "scaled")


def test_more_and_fewer_frontends_while_requests_run_lose_nothing(server: Server, scaled: str) -> None:
    expected = [tokens_of(Call(server, scaled, **long_request(seed, 60)).all()) for seed in range(6)]
    (engine,) = server.engine_pids(scaled)
    for frontends in (3, 1):
        calls = [Call(server, scaled, **long_request(seed, 60)) for seed in range(6)]
        firsts = [call.next() for call in calls]
        told = CliRunner().invoke(app, ["scale", scaled, str(frontends), "--url", server.grpc])
        assert told.exit_code == 0, told.output
        assert [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)] == expected
        wait_until(lambda wanted=frontends: len(server.stub_pids(scaled)) == wanted, "the others have gone", 20.0)
    assert server.engine_pids(scaled) == [engine]


@pytest.mark.parametrize(
    ("model", "says"),
    [("tokenizer", "has no frontends"), ("ensemble", "has no frontends"), ("nobody", "unknown model")],
)
def test_what_has_no_frontends_is_not_scaled(server: Server, model: str, says: str) -> None:
    told = CliRunner().invoke(app, ["scale", model, "2", "--url", server.grpc])
    assert told.exit_code == 1
    assert says in told.output


def test_cancellation_frees_blocks(server: Server) -> None:
    wait_until(lambda: server.metric(USED, model="demo") == 0, "the pool is idle")
    call = Call(server, **long_request(1, max_tokens=1200))
    call.next()
    wait_until(lambda: server.metric(USED, model="demo") > 0, "the stream holds blocks")
    call.cancel()
    wait_until(lambda: server.metric(USED, model="demo") == 0, "its blocks are free", 20.0)
    # another frontend than the one that writes the pool's gauges may have had it
    ended = "vllm:request_success_total"
    wait_until(lambda: server.metric(ended, model="demo", finished_reason="cancelled") >= 1, "it is counted", 5.0)


def test_http_stream_whose_client_goes_away_frees_blocks(server: Server) -> None:
    body = json.dumps({"text_input": PROMPT, "stream": True, "max_tokens": 1200, "ignore_eos": True}).encode()
    head = f"POST /v2/models/demo/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: server.metric(USED, model="demo") > 0, "the stream holds blocks")
    wait_until(lambda: server.metric(USED, model="demo") == 0, "its blocks are free", 5.0)


def test_sixteen_streams_survive_kill_9_of_the_engine(server: Server) -> None:
    """Every stream is completed with the tokens it would have had: none lost, none twice."""
    few = 48
    undisturbed = [Call(server, **long_request(seed, few)) for seed in range(16)]
    expected = [tokens_of(call.all()) for call in undisturbed]
    calls = [Call(server, **long_request(seed, few)) for seed in range(16)]
    firsts = [call.next() for call in calls]
    (old,) = server.engine_pids("demo")
    os.kill(old, signal.SIGKILL)
    got = [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)]
    assert got == expected
    (new,) = server.engine_pids("demo")
    assert new != old
    assert text_of(Call(server, **long_request(99, few)).all())


@pytest.mark.slow  # tests/serving/link holds it too
def test_requests_sent_while_the_engine_restarts_are_served(server: Server) -> None:
    (old,) = server.engine_pids("demo")
    os.kill(old, signal.SIGKILL)
    assert len(tokens_of(Call(server, **long_request(5, 8)).all())) == 8


@pytest.mark.slow  # as all answers of a request are, in tests/serving/link
def test_a_beam_search_is_begun_again_by_the_next_engine(server: Server) -> None:
    fields = {"beam_width": 4, "max_tokens": 100, "ignore_eos": True}
    asked = {"text_input": PROMPT, "parameters": fields, "exclude_input_in_output": True}
    (expected,) = Call(server, **asked).all()
    call = Call(server, **asked)
    wait_until(lambda: server.metric(USED, model="demo") > 0, "the beams hold blocks")
    (old,) = server.engine_pids("demo")
    os.kill(old, signal.SIGKILL)
    (found,) = call.all()
    assert found["text_output"] == expected["text_output"]
    assert len(found["text_output"]) == 4


def test_a_beam_search_whose_client_goes_away_frees_blocks(server: Server) -> None:
    call = Call(server, text_input=PROMPT, parameters={"beam_width": 4, "max_tokens": 1000, "ignore_eos": True})
    wait_until(lambda: server.metric(USED, model="demo") > 0, "the beams hold blocks")
    call.cancel()
    wait_until(lambda: server.metric(USED, model="demo") == 0, "their blocks are free", 20.0)


@pytest.mark.parametrize("trouble", [pytest.param("folder removed", marks=pytest.mark.slow), "disk full"])
def test_streams_survive_kill_9_when_the_run_folder_cannot_be_relied_on(server: Server, trouble: str) -> None:
    """Frontends that may write no byte to any file have a full disk; so has the engine that they start."""
    few = 48
    expected = [tokens_of(Call(server, **long_request(seed, few)).all()) for seed in range(4)]
    calls = [Call(server, **long_request(seed, few)) for seed in range(4)]
    firsts = [call.next() for call in calls]
    (old,) = server.engine_pids("demo")
    stubs = server.stub_pids("demo")
    if trouble == "folder removed":
        shutil.rmtree(server.run_folder())
    else:
        allow_files_of(stubs, 0)
    try:
        os.kill(old, signal.SIGKILL)
        got = [tokens_of([first, *call.all()]) for first, call in zip(firsts, calls, strict=True)]
    finally:
        allow_files_of([*stubs, *server.engine_pids("demo")], resource.RLIM_INFINITY)
    assert got == expected
    (new,) = server.engine_pids("demo")
    assert new != old
    assert server.has("demo")
    assert server.run_folder().exists()
    assert all(answered(server, "demo") for _ in range(4)), "every frontend has found it"


def test_engine_that_cannot_come_back_ends_streams_and_the_model(
    server: Server, models: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    repository.write_llm(models, "doomed", {"model": str(folder), **SETTINGS, "restart_limit": "0"})
    assert server.load("doomed") is None
    calls = [Call(server, "doomed", **long_request(seed, 1200)) for seed in range(16)]
    for call in calls:
        call.next()
    (engine,) = server.engine_pids("doomed")
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    for call in calls:
        with pytest.raises(InferenceServerException, match="killed by SIGKILL"):
            call.all()
    assert time.monotonic() - killed < 10.0  # nobody waits for another engine
    wait_until(lambda: not server.has("doomed"), "the model stops answering ready", 10.0)
    wait_until(lambda: server.engine_pids("doomed") == [], "no process is left", 10.0)
    assert text_of(Call(server, **long_request(7, 4)).all())


@pytest.fixture
def tended(models: Path, tmp_path: Path) -> Iterator[Server]:
    """A server of its own whose dead instances are replaced, as `nereid serve` does. 2.51 never ends a request that ran
    in a dead stub, nor itself then."""
    running = Server(models, tmp_path / "log", models=("demo", "tokenizer", "ensemble")).wait_ready()
    sentences: list[str] = []
    replacement = Replacement(running.process.pid, Repository(running.http_port), sentences.append)
    replacement.start()
    try:
        yield running
    finally:
        replacement.close()
        running.process.kill()
        running.process.wait()


def test_a_dead_frontend_is_replaced_and_the_others_streams_go_on(tended: Server) -> None:
    """The engine aborts the requests of a frontend that was killed and goes on with the others'; one of those takes
    over the supervision of the engine, whose death here meets the replacement. The engine stands still while the
    frontend is killed: 2.51 aborts when a stub dies in the middle of a response.
    """
    most = 600
    calls = [Call(tended, **long_request(seed, most)) for seed in range(2)]
    firsts = [call.next() for call in calls]
    wait_until(lambda: tended.metric(RUNNING, model="demo") == 2, "both run")
    before = set(tended.stub_pids("demo"))
    (engine,) = tended.engine_pids("demo")
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: silent_for(calls, 0.5), "no response is on its way")
    dead = leader(tended.stub_pids("demo"))
    os.kill(dead, signal.SIGKILL)
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: tended.metric("nereid:frontends_lost", model="demo") == 1, "its death is counted")
    wait_until(lambda: tended.metric(RUNNING, model="demo") == 1, "the dead frontend's request is gone")
    os.kill(engine, signal.SIGKILL)
    came = until_one_ends(calls)
    lengths = [len(tokens_of([first, *responses])) for first, responses in zip(firsts, came, strict=True)]
    assert max(lengths) == most, "the other frontend's request goes on, in the next engine process"
    assert min(lengths) < most
    wait_until(lambda: tended.metric("nereid:frontends", model="demo") == 2, "another has taken its place")
    after = set(tended.stub_pids("demo"))
    assert len(after) == 2
    assert after & before == before - {dead}, "the other one lives on"
    assert len(tended.engine_pids("demo")) == 1
    assert all(answered(tended, "demo") for _ in range(4))
    assert [call.final for call in calls].count(True) == 1, "the dead frontend's request has not come back"


def test_when_all_instances_die_new_ones_find_the_engine(tended: Server) -> None:
    """Of a model with an engine process and of one without; the ensemble over both is whole again too."""
    (engine,) = tended.engine_pids("demo")
    old = [*tended.stub_pids("demo"), *tended.stub_pids("tokenizer")]
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(tended.stub_pids("demo")) == 2 and tended.stub_pids("tokenizer"), "others are there")
    ask = json.dumps({"text_input": PROMPT, "max_tokens": 4}).encode()
    wait_until(lambda: tended.post("/v2/models/ensemble/generate", ask)[0] == 200, "they answer")
    assert not {*tended.stub_pids("demo"), *tended.stub_pids("tokenizer")} & set(old)
    assert tended.engine_pids("demo") == [engine]
    wait_until(lambda: tended.metric("nereid:frontends_lost", model="demo") == 2, "the deaths are counted")


@pytest.mark.parametrize(
    "newborn", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["at once", "when they answer"]
)
def test_instances_whose_replacements_die_too_are_replaced_again(tended: Server, newborn: bool) -> None:
    """Those that are killed before their first word would have 2.51 wait for them for ever. Between the two lies their
    first exchange with the server, which 2.51 does not survive when it is cut (docs/reliability.md)."""
    seen: set[int] = set()
    ask = json.dumps({"text_input": PROMPT, "max_tokens": 4}).encode()
    answers = lambda: tended.post("/v2/models/ensemble/generate", ask)[0] == 200  # noqa: E731
    for _ in range(2):
        wanted = {"demo": 2, "tokenizer": 1}
        wait_until(lambda: all(len(fresh(tended, model, seen)) >= n for model, n in wanted.items()), "they are there")  # noqa: B023
        if not newborn:
            wait_until(answers, "they answer")
            wait_until(lambda: tended.metric("nereid:frontends", model="demo") == 2, "both are at work")
        pids = set().union(*(fresh(tended, model, seen) for model in wanted))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        seen |= pids
    wait_until(answers, "they answer")
    wait_until(lambda: len(tended.stub_pids("demo")) == 2, "all are there")
    wait_until(lambda: all(answered(tended, "demo") for _ in range(4)), "each of them answers")
    assert tended.load("demo") is None, "the server can load the model again"


def fresh(server: Server, model: str, seen: set[int]) -> set[int]:
    return set(server.stub_pids(model)) - seen


def test_load_and_unload_leave_nothing_behind(server: Server, models: Path, checkpoint: Path) -> None:
    repository.write_llm(models, "cycled", {"model": str(checkpoint), **SETTINGS})
    regions, folders = shared_memory(server), set(server.run_folder().iterdir())
    assert server.load("cycled") is None
    assert tokens_of(Call(server, "cycled", **long_request(3, 8)).all())
    server.unload("cycled")
    wait_until(lambda: server.engine_pids("cycled") == [], "the engine process is gone", 15.0)
    wait_until(lambda: server.stub_pids("cycled") == [], "the frontends are gone", 15.0)
    assert set(server.run_folder().iterdir()) <= folders
    wait_until(lambda: shared_memory(server) <= regions, "shared memory is given back", 15.0)


def test_sigterm_drains_and_leaves_nothing_behind(models: Path, checkpoint: Path, tmp_path: Path) -> None:
    """To all processes at once, as systemd sends it."""
    running = Server(models, tmp_path / "log", models=("demo",)).wait_ready()
    calls = [Call(running, **long_request(seed, 200)) for seed in range(4)]
    firsts = [call.next() for call in calls]
    (engine,) = running.engine_pids("demo")
    for pid in (running.process.pid, *guard.descendants(running.process.pid)):
        os.kill(pid, signal.SIGTERM)
    for first, call in zip(firsts, calls, strict=True):
        assert len(tokens_of([first, *call.all()])) == 200
    assert running.process.wait(30) == 0
    assert start_time(engine) is None
    assert not running.run_folder().exists()


def test_the_engine_and_frontends_that_are_stuck_die_with_a_server_that_is_killed(models: Path, tmp_path: Path) -> None:
    """One that sets a gauge while the server dies waits for its answer with the interpreter's lock held: it cannot do
    more for its end than one that stands still."""
    running = Server(models, tmp_path / "log", models=("demo",)).wait_ready()
    (engine,) = running.engine_pids("demo")
    os.kill(running.stub_pids("demo")[0], signal.SIGSTOP)
    running.process.kill()
    running.process.wait()
    wait_until(lambda: start_time(engine) is None, "the engine process is gone", 5.0)
    wait_until(lambda: running.stub_pids("demo") == [], "the frontends are gone", 5.0)
    assert not running.run_folder().exists()


def allow_files_of(pids: list[int], size: int) -> None:
    """Let processes write files of so many bytes at most."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def leader(pids: list[int]) -> int:
    """The frontend that supervises the engine: the one that has the lock's file open."""
    for _ in range(100):
        for pid in pids:
            if any(os.path.basename(os.readlink(fd)) == "leader" for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
        time.sleep(0.05)
    raise AssertionError("no frontend leads")


def silent_for(calls: list[Call], seconds: float) -> bool:
    """Whether no response comes to any of these within `seconds`."""
    arrived = [call.arrived for call in calls]
    time.sleep(seconds)
    return arrived == [call.arrived for call in calls]


def until_one_ends(calls: list[Call]) -> list[list[dict[str, Any]]]:
    """What comes of each until one has its last response; the server may give others up before."""
    came: list[list[dict[str, Any]]] = [[] for _ in calls]
    while not any(call.final for call in calls):
        for call, responses in zip(calls, came, strict=True):
            with contextlib.suppress(queue.Empty, InferenceServerException):
                while not call.final:
                    responses.append(call.next(timeout_s=0.1))
    return came


def answered(server: Server, model: str) -> bool:
    try:
        return bool(tokens_of(Call(server, model, **long_request(11, 4)).all()))
    except InferenceServerException:
        return False


def shared_memory(server: Server) -> set[str]:
    """The Python backend's regions that this server has mapped."""
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    return set(re.findall(r"triton_python_backend_shm_region_[\w-]+", maps))
