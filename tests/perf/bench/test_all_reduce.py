"""The benchmark of sums runs from its command line to its table where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.bench.all_reduce import FEW_ROWS, main, parse_size, table
from tests.compiled import environment


@pytest.mark.slow
def test_two_processes_measure_and_check_their_sums(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    command = [sys.executable, "-m", "perf.bench.all_reduce", "--json", str(file)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no GPU: figures say nothing of speed" in done.stdout
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["bytes"] for line in lines] == [4 * 64 * rows for rows in FEW_ROWS]
    assert all(line["one-shot, norm inside"] > 0 and line["commit"] for line in lines)
    assert done.stdout.splitlines()[-len(lines) :] == table(lines)[2:]


def test_a_table_marks_the_fastest_sum() -> None:
    line = {"bytes": 8192, "ranks": 2, "library": 9.0, "one-shot": 4.0, "two-shot": 6.0, "library, norm apart": 3.0}
    assert table([line])[-1] == "| 8 KB | 9.0 | **4.0** | 6.0 | 3.0 |"
    assert table([line, line | {"one-shot": None}])[-1] == "| 8 KB | 9.0 | - | **6.0** | 3.0 |"


@pytest.mark.parametrize("text", ["64", "MB", "-1KB", "1GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert parse_size("512KB") == 512 << 10
    with pytest.raises(SystemExit):
        main(["--largest", text])
