"""What is said where the Python of other processes cannot be run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engine import env, interpreter


def test_the_python_of_the_environment_runs_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PYTHON, "echo")
    with interpreter.start(["-m", "a.module"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"-m a.module\n"


@pytest.mark.parametrize(
    ("held", "why"),
    [("nothing", "No such file or directory"), ("folder", "Permission denied"), ("text", "Permission denied")],
)
def test_one_that_cannot_be_run_is_named_with_its_variable(
    held: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    if held == "folder":
        python.mkdir()
    elif held == "text":
        python.touch(mode=0o644)
    monkeypatch.setenv(env.PYTHON, str(python))
    with pytest.raises(OSError, match="set NEREID_PYTHON to a Python that has") as refused:
        interpreter.start(["-c", ""])
    assert f"{python} cannot be run ({why})" in str(refused.value.strerror)


def test_a_system_without_another_process_is_not_the_pythons_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(BlockingIOError):
        interpreter.start(["-c", ""])
