"""The engine process comes back, whatever has become of the run folder and its disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import env
from engine.config import EngineConfig
from engine.serving.frontend.supervisor import Supervisor
from engine.serving.host.host import Host
from engine.serving.link.process_watch import start_time
from engine.serving.link.run_folder import EngineState, RunFolder
from tests.serving import scripted_host
from tests.serving.rig import Rig
from tests.serving.stub import Error, tokens_of


def no_state(folder: RunFolder) -> None:
    """No state can be written from here on: a folder that is not empty stands where it belongs."""
    (folder.path / "state").unlink(missing_ok=True)
    (folder.path / "state" / "in the way").mkdir(parents=True)


def test_streams_go_on_when_the_run_folder_is_removed_and_the_engine_dies(rig: Callable[..., Rig]) -> None:
    """Also when that happens again, and a frontend that comes later finds the engine."""
    running = rig()
    expected = tokens_of(running.submit().all())
    for _ in range(2):
        request = running.submit()
        first = request.next()
        shutil.rmtree(running.folder.server_folder)
        running.kill()
        assert tokens_of([first, *request.all()]) == expected
    assert tokens_of(rig(name="f1").submit().all()) == expected
    assert len(running.folder.engines()) == 1


def test_an_engine_whose_socket_was_removed_is_found_by_frontends_that_come_later(rig: Callable[..., Rig]) -> None:
    running = rig()
    before = running.engine_pid()
    shutil.rmtree(running.folder.server_folder)
    assert len(tokens_of(rig(name="f1").submit().all())) == 120
    assert running.engine_pid() == before
    assert start_time(before) is not None


def test_state_that_cannot_be_written_is_said_and_stops_nothing(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    running = rig()
    expected = tokens_of(running.submit().all())
    no_state(running.folder)
    request = running.submit()
    first = request.next()
    running.kill()
    assert tokens_of([first, *request.all()]) == expected
    engine = running.engine_pid()
    assert f"the other frontends cannot be told of engine 2 (pid {engine}): Is a directory" in caplog.text
    shutil.rmtree(running.folder.path / "state")
    wait_until(lambda: RunFolder.read_state(anew(running)) == EngineState(2, engine))
    no_state(running.folder)
    running.kill()
    wait_until(lambda: running.engine_pid() != engine and running.engine.ready.is_set())
    last = running.engine_pid()
    running.close()
    assert start_time(last) is None, "an engine of which nobody else knows is not left behind"


def test_a_folder_that_cannot_be_written_ends_the_load_with_a_sentence(
    rig: Callable[..., Rig],
) -> None:
    running = rig(entered=no_state)
    assert running.engine.failed == (
        f"the run folder {running.folder.path} cannot be written (Is a directory): make room there, or set "
        "NEREID_RUN_DIR elsewhere"
    )
    assert running.folder.engines() == []


def test_without_a_folder_to_lead_in_the_model_ends_when_its_engine_is_gone_for_long(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.serving.frontend.supervisor._HOPELESS_S", 0.5)
    running = rig()
    gave_up: list[bool] = []
    running.frontend.on_give_up = lambda: gave_up.append(running.engine.leading)
    request = running.submit()
    shutil.rmtree(running.folder.server_folder)
    running.folder.server_folder.touch()
    running.kill()
    try:
        with pytest.raises(Exception, match=r"the run folder .* cannot be written \(Not a directory\)"):
            request.all()
        wait_until(lambda: bool(gave_up))
        assert gave_up == [True], "the model is taken out of service"
    finally:
        running.folder.server_folder.unlink()


def test_an_engine_process_that_cannot_be_started_is_tried_again(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = rig()
    request = running.submit()
    popen, failures = subprocess.Popen, [OSError(24, "Too many open files"), OSError(12, "Cannot allocate memory")]

    def start(*words: object, **how: object) -> object:
        if failures:
            raise failures.pop()
        return popen(*words, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start)
    running.kill()
    assert len(tokens_of(request.all())) == 120
    assert not failures


def test_a_python_that_cannot_be_run_is_named(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    running = rig(restart_limit=1)
    request = running.submit()
    monkeypatch.setenv(env.PYTHON, "/nowhere/python")
    running.kill()
    with pytest.raises(
        Error, match=r"\(/nowhere/python cannot be run \(No such file or directory\): set NEREID_PYTHON"
    ):
        request.all()


def test_an_engine_that_a_signal_without_a_name_killed_is_replaced(rig: Callable[..., Rig]) -> None:
    """Its supervisor looked for the name, again and again."""
    running = rig()
    request = running.submit()
    os.kill(running.engine_pid(), signal.SIGRTMIN + 1)
    assert len(tokens_of(request.all())) == 120


def test_an_engine_that_nobody_was_told_of_is_adopted(rig: Callable[..., Rig]) -> None:
    """The frontend that started it was killed before it could say so."""
    running = rig()
    engine = running.engine_pid()
    running.supervisor.stop()
    (running.folder.path / "state").unlink()
    second = rig(name="f1")
    assert second.engine.ready.wait(30)
    assert second.engine_pid() == engine
    assert len(tokens_of(second.submit().all())) == 120


def test_an_engine_that_dies_before_a_new_frontend_has_met_it_is_replaced(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was removed, and the new frontend leads, in a model that others have served: its first engine dies,
    and that ends no load."""
    running = rig()
    wait_until(running.folder.has_served)
    expected = tokens_of(running.submit().all())
    born: list[int] = []
    spawn = Supervisor._spawn

    def dies(self: Supervisor, epoch: int) -> EngineState:
        state = spawn(self, epoch)
        born.append(state.pid)
        if len(born) == 1:
            os.kill(state.pid, signal.SIGKILL)
        return state

    def removed(folder: RunFolder) -> None:
        running.supervisor.stop()  # so that the next one leads
        running.kill()
        wait_until(lambda: not folder.engines())
        shutil.rmtree(folder.server_folder)
        running.folder.restore()

    monkeypatch.setattr(Supervisor, "_spawn", dies)
    second = rig(name="f1", entered=removed)
    assert second.engine.settled.wait(30)
    assert second.engine.failed is None
    assert tokens_of(second.submit().all()) == expected
    assert len(born) == 2


def test_an_engine_process_in_whose_place_is_another_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, os.getpid(), "model")
    folder.enter()
    folder.write_state(EngineState(1, 1))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert Host(folder, 1, "m", EngineConfig(model="fine"), scripted_host.build).run() == 0
    finally:
        signal.signal(signal.SIGTERM, handler)


def anew(running: Rig) -> RunFolder:
    """The folder as a frontend sees it that has seen nothing yet."""
    return RunFolder(running.folder.server_folder.parent, os.getpid(), "model")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
