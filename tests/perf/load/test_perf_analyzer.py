from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf.load import perf_analyzer
from perf.load.perf_analyzer import PerfAnalyzerError


def export(*requests: tuple[int, list[tuple[int, int | None]]]) -> dict[str, Any]:
    """A profile export of (start in ms, [(time in ms, tokens or None for the empty final response)])."""
    return {
        "experiments": [
            {
                "experiment": {"mode": "concurrency", "value": 2},
                "requests": [
                    {
                        "timestamp": start * 1_000_000,
                        "response_timestamps": [at * 1_000_000 for at, _ in responses],
                        "response_outputs": [{} if n is None else {"num_output_tokens": n} for _, n in responses],
                    }
                    for start, responses in requests
                ],
            }
        ]
    }


def test_figures_are_a_token_each() -> None:
    profile = perf_analyzer.read_export(
        export((1000, [(1010, 1), (1015, 1), (1025, 1)]), (1005, [(1025, 2), (1045, 1)])), max_tokens=3
    )
    assert profile.ttft == pytest.approx([0.010, 0.020])
    assert profile.itl == pytest.approx([0.005, 0.010, 0.0, 0.020])
    assert profile.latency == pytest.approx([0.025, 0.040])
    assert (profile.num_requests, profile.num_tokens, profile.concurrency) == (2, 6, 2)
    assert profile.seconds == pytest.approx(0.045)


def test_the_empty_final_response_is_no_token() -> None:
    profile = perf_analyzer.read_export(export((0, [(10, 1), (20, 1), (900, None)])), max_tokens=2)
    assert profile.itl == pytest.approx([0.010])
    assert profile.latency == pytest.approx([0.020])


def test_a_short_answer_or_none_is_a_failure() -> None:
    with pytest.raises(PerfAnalyzerError, match="1 tokens instead of 2"):
        perf_analyzer.read_export(export((0, [(10, 1)])), max_tokens=2)
    with pytest.raises(PerfAnalyzerError, match="no request"):
        perf_analyzer.read_export(export(), max_tokens=2)


def test_every_answer_is_asked_to_be_as_long() -> None:
    (request,) = perf_analyzer.input_data("hi", 7)["data"]
    parameters = json.loads(request["sampling_parameters"][0])
    assert (parameters["max_tokens"], parameters["ignore_eos"]) == (7, True)


def test_an_export_that_was_cut_short_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in its place whose first export ends in the middle, as the 2.50.0 binary's sometimes does, and which
    refuses an export that is there already, as that one does."""
    whole = json.dumps(export((0, [(10, 1), (20, 1)])))
    program = tmp_path / "perf_analyzer"
    program.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do case "$word" in --profile-export-file=*) out="${word#*=}";; esac; done\n'
        'if [ -e "$out" ]; then exit 99; fi\n'
        f"if [ -e {tmp_path}/ran ]; then printf '%s' '{whole}' > \"$out\"\n"
        f"else touch {tmp_path}/ran; printf '%.40s' '{whole}' > \"$out\"; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "binary", lambda: str(program))
    profile = perf_analyzer.run("nowhere", "demo", concurrency=1, requests=1, prompt="hi", max_tokens=2)
    assert profile.num_tokens == 2
    assert (tmp_path / "ran").exists()
