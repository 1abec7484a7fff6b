from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(400)
def test_perf_analyzer_and_locust_pass_against_the_real_server() -> None:
    """The command of `make perf-smoke`."""
    done = subprocess.run(
        [sys.executable, "-m", "perf.load.smoke", "--seconds", "3"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perf-smoke passed: 0 failures" in done.stdout
