"""Where a figure comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.provenance import provenance

ROOT = Path(__file__).parents[2]


def test_a_figure_names_commit_command_date_machine_and_versions() -> None:
    program = "import json; from perf.provenance import provenance; print(json.dumps(provenance()))"
    done = subprocess.run([sys.executable, "-c", program, "--rows", "8"], cwd=ROOT, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert {"commit", "command", "date", "python"} <= set(said)
    assert "gpu" in said or "cores" in said["cpu"]
    assert said["command"].endswith("--rows 8")


def test_a_copy_without_git_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_COMMIT", "0123abc")
    assert provenance.__wrapped__()["commit"] == "0123abc"
