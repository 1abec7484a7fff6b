"""`nereid perf-analyzer` is NVIDIA's binary with its libraries, also for programs that start it themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clients.python import perf_analyzer
from engine import env


def test_the_command_passes_its_words_on() -> None:
    nereid = Path(sys.executable).parent / "nereid"
    done = subprocess.run([nereid, "perf-analyzer", "--version"], capture_output=True, text=True)
    assert "Perf Analyzer Version" in done.stdout + done.stderr
    wrong = subprocess.run([nereid, "perf-analyzer", "-m"], capture_output=True, text=True)
    assert (wrong.returncode != 0, "requires an argument" in wrong.stderr) == (True, True)


def test_a_folder_for_path_has_a_program_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "a cache"))
    command = [Path(sys.executable).parent / "nereid", "perf-analyzer", "--folder"]
    for _ in range(2):  # made once, found again
        folder = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "LD_LIBRARY_PATH": "/nowhere"}
    done = subprocess.run(["perf_analyzer", "--version"], env=paths, capture_output=True, text=True)
    assert "Perf Analyzer Version" in done.stdout + done.stderr


def test_without_the_binary_the_sentence_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(perf_analyzer.NoPerfAnalyzer, match=r"pip install tritonclient==2\.50\.0"):
        perf_analyzer.on_path(tmp_path)
