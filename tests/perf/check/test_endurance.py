"""`perf.check.endurance` says no when something is left, lost or changed, and yes of a server that does neither."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perf import shapes
from perf.check import endurance
from perf.check.endurance import BESIDE, DEVICE_MB, SETTLED, Sample, grown, told_of_loads, told_of_overcommit
from tests.e2e.harness import free_ports

HELD = Sample(device_mb=9000, rss_mb=300, descriptors=70, regions=4, processes=8)
WHOLE = list(range(BESIDE.max_tokens))
OVERCOMMITTED = {"failed": 0, "short": 0, "alone_different": 0, "blocks_left": 0, "preemptions": 40}


def test_what_the_first_cycles_and_the_server_itself_take_is_no_leak() -> None:
    warming = [replace(HELD, device_mb=1000 * n, descriptors=10 * n) for n in range(1, SETTLED)]
    last = replace(HELD, device_mb=9000 + DEVICE_MB, rss_mb=400)
    assert grown([*warming, HELD, last]) == []
    assert len(grown([*warming, warming[-1], HELD, last])) == 2  # one cycle later
    assert grown([HELD, replace(HELD, descriptors=60, regions=3)]) == []
    assert grown([replace(HELD, device_mb=None)] * 2) == []


@pytest.mark.parametrize(
    ("last", "named"),
    [
        (replace(HELD, device_mb=HELD.device_mb + DEVICE_MB + 1), "device memory: 9000 MB before, 9065 after"),
        (replace(HELD, descriptors=71), "descriptors: 70 before, 71 after"),
        (replace(HELD, regions=5), "regions: 4 before, 5 after"),
        (replace(HELD, processes=9), "processes: 8 before, 9 after"),
    ],
)
def test_what_the_last_unload_leaves_is_named(last: Sample, named: str) -> None:
    (sentence,) = grown([HELD] * 9 + [last])
    assert sentence == f"{named} the last unload"


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (WHOLE, []),
        (WHOLE[:-1], ["1 requests: short", "1 requests: different"]),
        ([*WHOLE[:-1], 0], ["1 requests: different"]),
        ("the engine is not there", ["1 requests: errors", "the engine is not there"]),
    ],
)
def test_each_answer_beside_a_load_is_whole_and_the_same(answer: list[int] | str, wrong: list[str]) -> None:
    found = told_of_loads([HELD] * 3, [WHOLE, answer, WHOLE], [5.0, 7.0, 6.0])
    assert found["wrong"] == wrong
    assert (found["cycles"], found["seconds"], found["cycle_s"], found["requests"]) == (3, 18.0, 6.0, 3)


@pytest.mark.parametrize(
    ("name", "value"), [("failed", 1), ("short", 2), ("alone_different", 1), ("blocks_left", 3), ("preemptions", 0)]
)
def test_an_overcommitted_pool_costs_no_token(name: str, value: int) -> None:
    assert told_of_overcommit(OVERCOMMITTED)["wrong"] == []
    (sentence,) = told_of_overcommit({**OVERCOMMITTED, name: value})["wrong"]
    assert sentence.startswith("no request was preempted" if name == "preemptions" else f"{name}: {value}")


def test_what_it_cannot_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in ((["load"], "no figure is called load"), (["--cycles", "1"], "give 2 or more")):
        with pytest.raises(SystemExit):
            endurance.main(["model", *words])
        assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_of_a_model_without_weights_passes(tmp_path: Path) -> None:
    """In a process of its own: its clients are forked, and other tests have gRPC connections."""
    model, results = shapes.write(tmp_path, "tiny", layers=1), tmp_path / "results.jsonl"
    words = [str(model), "--set", "load_format=dummy", "--json", str(results), "--frontends", "1", "--cycles", "2"]
    words += ["--requests", "8", "--tokens", "64", "--held", "2", "--alone", "2", "--processes", "1"]
    script = f"""
import sys
from perf import suite
suite.HTTP, suite.GRPC, suite.METRICS = {free_ports(3)}
from perf.check.endurance import main
sys.exit(main({words}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    overcommit, loads = map(json.loads, results.read_text().splitlines())
    assert (overcommit["figure"], overcommit["short"], overcommit["alone"]) == ("overcommit", 0, 2)
    assert overcommit["preemptions"] > 0
    assert (loads["figure"], loads["cycles"], loads["requests"]) == ("loads", 2, 6)
