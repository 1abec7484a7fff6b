"""What `make test` says of Debian packages that it cannot have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("packages.py")


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with nothing but `path` on PATH."""
    environment = {**os.environ, "PATH": str(path)}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=30
    )


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    command = tmp_path / "thing"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    ended = run(tmp_path, "--required", "thing=thing")
    assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.parametrize(("required", "status"), [(False, 0), (True, 1)])
def test_without_apt_the_missing_command_is_named(tmp_path: Path, required: bool, status: int) -> None:
    ended = run(tmp_path, *["--required"] * required, "thing=thing-package")
    assert ended.returncode == status
    assert "not installed: thing: this is not Debian or Ubuntu" in ended.stdout
    assert ("skipped" in ended.stdout) != required


def test_a_network_that_is_not_there_is_a_sentence_too(tmp_path: Path) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: Could not resolve host'\nexit 100\n")
    apt.chmod(0o755)
    ended = run(tmp_path, "thing=thing-package")
    assert ended.returncode == 0
    reason = "apt-get update failed: E: Could not resolve host" if os.geteuid() == 0 else "only root can"
    assert reason in ended.stdout
