"""The measurement of 8-bit caches, on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from perf import shapes
from perf.bench import cache


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["shapes", str(tmp_path), "tiny"])
    shapes.main()
    return tmp_path / "tiny"


SETTINGS = ["load_format=dummy", "runtime.dtype=float32"]


def test_both_caches_are_measured_in_one_process(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["cache", str(tiny), "--rows", "3", "--context", "40", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [*words, *(word for setting in SETTINGS for word in ("--set", setting))])
    cache.main()
    said = capsys.readouterr().out
    assert "512 bytes a token" in said
    assert "128 bytes a token" in said
    assert "of the time" in said
    kinds = [json.loads(line)["settings"][-1] for line in out.read_text().splitlines()]
    assert kinds == ["cache.dtype=16bit", "cache.dtype=fp8"]


def test_rows_that_would_share_blocks_are_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="the pool holds 48 tokens and 3 rows of 40 need 120"):
        cache.step(str(tiny), [*SETTINGS, "cache.num_blocks=4"], 3, 40)
