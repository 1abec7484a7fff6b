"""Where frontends and engine meet: which share an engine process, what the killed leave behind, what cannot serve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import env
from engine.config import EngineConfig
from engine.serving.link.run_folder import EngineState, RunFolder, RunFolderError, end_streams, model_key

REMEDY = "set NEREID_RUN_DIR to a short path of a folder of your own"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_settings_of_the_engine_and_the_checkpoints_files_tell_two_engines_apart(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint))
    before = model_key("m", "1", config)
    assert model_key("m", "1", EngineConfig(model=str(checkpoint))) == before
    assert model_key("m", "1", EngineConfig(model=str(checkpoint), max_model_len=64)) != before
    assert model_key("m", "2", config) != before
    assert model_key("n", "1", config) != before
    os.utime(checkpoint / "config.json", ns=(0, 2**61))
    assert model_key("m", "1", config) != before


def test_a_failure_that_quotes_half_a_character_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, os.getpid(), "m")
    folder.path.mkdir(parents=True)
    folder.write_failure(1, "config.json names the architecture \ud800, which is not implemented")
    assert folder.read_failure(1) == "config.json names the architecture \\ud800, which is not implemented"


def test_a_folder_whose_frontends_and_engine_are_all_dead_is_begun_anew(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder = RunFolder(tmp_path, os.getpid(), "m")
    folder.path.mkdir(parents=True)
    (folder.path / f"frontend-{gone.pid}").touch()
    folder.write_state(EngineState(1, gone.pid))
    folder.enter()
    assert folder.read_state() is None


def test_an_engine_that_lives_is_found_by_frontends_that_come_after_all_have_died(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, os.getpid(), "m")
    folder.path.mkdir(parents=True)
    folder.write_state(EngineState(3, os.getpid()))
    folder.enter()
    assert folder.read_state() == EngineState(3, os.getpid())


def test_a_folder_that_nobody_made_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", os.getpid(), "model")
    folder.enter()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with folder.leave() as last:
        assert last
    assert not folder.path.exists()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=rf"too long .* \(107 bytes\): {REMEDY}"):
        RunFolder(tmp_path / ("deep" * 25), os.getpid(), "model").enter()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary folder that all users share anybody may have made it first."""
    stat = Path.stat
    owned = os.stat_result((*stat(tmp_path)[:4], 4242, *stat(tmp_path)[5:]))
    monkeypatch.setattr(Path, "stat", lambda self, **how: owned if self == tmp_path else stat(self, **how))
    with pytest.raises(RunFolderError, match=f"belongs to the user 4242: {REMEDY}"):
        RunFolder(tmp_path, os.getpid(), "model").enter()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=rf"cannot be used \(Not a directory\): {REMEDY}"):
        RunFolder(tmp_path / "file" / "run", os.getpid(), "model").enter()


def test_a_full_disk_does_not_move_the_folder_elsewhere() -> None:
    """A process that may write no byte meets the same folder as those that could."""
    code = (
        "import resource as r; from engine import env; r.setrlimit(r.RLIMIT_FSIZE, (0, 0)); print(env.read().run_dir)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()) == env.read().run_dir


INSTANCE = """
import os, sys
from pathlib import Path
from engine.config import EngineConfig
from engine.serving.link.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
folder.enter()
print("entered", flush=True)
input()
with folder.leave():
    print(folder.other_stubs(), flush=True)
input()
"""


@pytest.mark.parametrize("keys", [("k", "k"), ("k", "other")], ids=["same", "reloaded"])
def test_the_last_instance_of_a_model_knows_that_it_is_the_last(
    tmp_path_factory: pytest.TempPathFactory, keys: tuple[str, str]
) -> None:
    """One that has left counts no more, though its process is still there; one under another configuration counts."""
    tmp_path = tmp_path_factory.mktemp("r")  # short: a socket's path ends at 107 bytes
    (tmp_path / "model.py").write_text(INSTANCE)
    instances = []
    try:
        for key in keys:
            words = [sys.executable, str(tmp_path / "model.py"), str(tmp_path / "r"), str(os.getpid()), key]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            path = {**os.environ, "PYTHONPATH": str(Path.cwd())}
            instances.append(subprocess.Popen(words, text=True, env=path, **pipes))  # type: ignore[call-overload]
        for instance in instances:
            assert instance.stdout.readline() == "entered\n"
        told = []
        for instance in instances:
            print(file=instance.stdin, flush=True)
            told.append(instance.stdout.readline().strip())
        # In another folder it cannot be known that the first has left: its series stay, which harms nobody.
        assert told == ["True", "False" if keys[0] == keys[1] else "True"]
    finally:
        for instance in instances:
            instance.kill()
            instance.wait()


def test_a_server_that_must_end_its_streams_leaves_no_folder(tmp_path: Path) -> None:
    first, second = (RunFolder(tmp_path, os.getpid(), key) for key in ("a", "b"))
    first.enter()
    second.enter()
    assert not first.must_end_streams()
    end_streams(tmp_path, os.getpid())
    assert first.must_end_streams()
    assert second.must_end_streams()
    for folder in (first, second):
        with folder.leave() as last:
            assert last
    assert [entry.name for entry in tmp_path.iterdir()] == ["lock"]


def test_a_server_without_a_folder_has_no_streams_to_end(tmp_path: Path) -> None:
    end_streams(tmp_path, os.getpid())
    assert list(tmp_path.iterdir()) == []
