"""The load report's table and pictures, out of figures as the tools give them."""

from __future__ import annotations

from pathlib import Path

from perf.load import perf_analyzer, smoke
from perf.load import report as load

ENTRIES = [
    {"method": kind, "name": name, "num_requests": 2, "response_times": {"10": 1, "20": 1}}
    for kind in smoke.KINDS
    for name in load.USERS.values()
]
PROFILES = [
    perf_analyzer.Profile(n, 2, 20, 2.0, ttft=[0.01, 0.02], itl=[0.001] * 18, latency=[0.1, 0.2]) for n in (1, 4)
]


def test_a_table_is_markdown_with_a_line_a_row() -> None:
    lines = load.markdown(smoke.table(ENTRIES)).splitlines()
    assert lines[0] == "| what | over | count | p50 | p95 | p99 |"
    assert lines[2] == "| TTFT | gRPC stream | 2 | 15 | 20 | 20 |"
    assert len(lines) == 2 + len(ENTRIES)
    assert load.markdown(perf_analyzer.table(PROFILES)).splitlines()[2].startswith("| 1 | 2 | 15.0 |")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    load.plot(ENTRIES, tmp_path / "locust.png")
    perf_analyzer.plot(PROFILES, tmp_path / "perf_analyzer.png")
    for name in ("locust", "perf_analyzer"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
