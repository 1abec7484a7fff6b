"""Repeated rows publish medians and ranges."""

from __future__ import annotations

from perf.bench.repeats import combined
from perf.bench.report import cell


def _run(speed: float, ttft: float, failed: int = 0, seed: int = 1) -> dict[str, object]:
    times = {"p50": ttft, "p99": 2 * ttft}
    return {
        "spec": "c=8",
        "seed": seed,
        "rate": None,
        "in_flight": 8,
        "requests": 8,
        "failed": failed,
        "output_tokens_per_s": speed,
        "ttft_ms": times,
        "tpot_ms": {"p50": 3.0},
        "itl_ms": {"p50": 3.0, "p99": 4.0},
    }


def test_figures_are_medians_with_their_range() -> None:
    merged = combined([_run(100.0, 9.0, seed=1), _run(300.0, 7.0, seed=2), _run(120.0, 30.0, failed=2, seed=3)])
    assert merged["output_tokens_per_s"] == 120.0
    assert merged["ttft_ms"] == {"p50": 9.0, "p99": 18.0}
    assert merged["low"]["output_tokens_per_s"] == 100.0
    assert merged["high"]["ttft_ms"]["p50"] == 30.0
    assert (merged["runs"], merged["failed"], merged["seed"], merged["spec"]) == (3, 2, 1, "c=8")


def test_one_run_stands_for_itself() -> None:
    assert combined([_run(100.0, 9.0)]) == {**_run(100.0, 9.0), "runs": 1}


def test_tables_show_the_range() -> None:
    assert cell("8x", combined([_run(1000.0, 9.0), _run(3000.0, 7.0), _run(1200.0, 8.0)])) == (
        "1,200 (1,000 to 3,000) tok/s, TPOT 3.00, TTFT 8 ms"
    )
    assert cell("8x", combined([_run(1000.0, 9.0)])) == "1,000 tok/s, TPOT 3.00, TTFT 9 ms"
