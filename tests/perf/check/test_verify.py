"""`make verify-gpu`: parts that fail or hang do not keep the others from running, and its file must be recent."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perf.check import verify
from perf.check.verify import Part, commits_behind, folder_of, main
from tests.e2e.harness import wait_until

PASSES, FAILS = ("-c", "print('all is well')"), ("-c", "print('it differs'); raise SystemExit(3)")
HANGS = ("-c", "import time; print('begun', flush=True); time.sleep(600)")
TELLS = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests behind itself
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("came to the seventh of nine")
"""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        Part("first", "one fails", "docs/correctness.md", FAILS, 60),
        Part("second", "one hangs", "docs/correctness.md", HANGS, 1.5),
        Part("third", "one passes", "docs/correctness.md", PASSES, 60, "cases"),
        Part("fourth", "one passes", "docs/correctness.md", PASSES, 60, "cases"),
    ]
    monkeypatch.setattr(verify, "parts", lambda models: made)
    monkeypatch.setattr(verify, "provenance", lambda: {"commit": "0123abc", "gpu": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setattr(verify, "write_models", lambda folder: None)
    monkeypatch.setattr(verify, "LAST_WORDS_S", 0.5)  # where a shell has signals ignored, what hangs is deaf


@pytest.mark.usefixtures("on_a_gpu")
def test_the_others_run_when_a_part_fails_or_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "verify.json"
    assert main(["--json", str(file)]) == 1
    held = json.loads(file.read_text())
    assert held["commit"] == "0123abc"
    outcomes = [(part["name"], part["outcome"]) for part in held["parts"]]
    assert outcomes == [("first", "failed"), ("second", "too slow"), ("third", "passed"), ("fourth", "passed")]
    assert "it differs" in held["parts"][0]["said"]
    assert "begun" in held["parts"][1]["said"]
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in table] == ["first", "second", "third", "fourth"]


def test_a_part_that_is_too_slow_says_how_far_it_came() -> None:
    slow = Part("slow", "one is slow", "docs/correctness.md", ("-c", TELLS), 3)
    outcome = verify.Parts(time.monotonic() + 60).outcome(slow)
    assert (outcome.outcome, outcome.said) == ("too slow", "came to the seventh of nine\n")


def test_a_part_that_does_not_end_when_asked_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "LAST_WORDS_S", 0.5)
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {HANGS[1]}"
    hangs = Part("deaf", "one hangs", "docs/correctness.md", ("-c", deaf), 1.5)
    outcome = verify.Parts(time.monotonic() + 60).outcome(hangs)
    assert (outcome.outcome, outcome.said) == ("too slow", "begun\n")


@pytest.mark.usefixtures("on_a_gpu")
def test_what_is_left_out_is_said_and_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    assert main(["--json", str(file), "--only", "third"]) == 1
    outcomes = [part["outcome"] for part in json.loads(file.read_text())["parts"]]
    assert outcomes == ["left out", "left out", "passed", "left out"]
    with pytest.raises(SystemExit):
        main(["--json", str(file), "--leave-out", "fifth"])


@pytest.mark.usefixtures("on_a_gpu")
def test_parts_that_run_one_after_another_are_one_result_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "verify.json"

    def outcomes() -> list[str]:
        return [part["outcome"] for part in json.loads(file.read_text())["parts"]]

    main(["--json", str(file), "--only", "third"])
    main(["--json", str(file), "--only", "first", "fourth"])
    assert outcomes() == ["failed", "left out", "passed", "passed"]
    monkeypatch.setattr(verify, "provenance", lambda: {"commit": "0123abd", "gpu": "NVIDIA H100 80GB HBM3"})
    main(["--json", str(file), "--only", "fourth"])
    assert outcomes() == ["left out", "left out", "left out", "passed"]


@pytest.mark.usefixtures("on_a_gpu")
def test_what_the_time_does_not_reach_is_too_slow(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    assert main(["--json", str(file), "--limit", "0"]) == 1
    assert {part["outcome"] for part in json.loads(file.read_text())["parts"]} == {"too slow"}


def test_a_run_that_is_ended_leaves_its_file_and_no_process(tmp_path: Path) -> None:
    """The machine may be taken away."""
    file, pid = tmp_path / "verify.json", tmp_path / "pid"
    hangs = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = f"""
from pathlib import Path
from perf.check import verify
verify.parts = lambda models: [
    verify.Part("hangs", "one hangs", "docs/correctness.md", ("-c", {hangs!r}), 600),
    verify.Part("waits", "one waits", "docs/correctness.md", ("-c", "pass"), 600),
]
verify.provenance = lambda: {{"commit": "0123abc", "gpu": "NVIDIA H100 80GB HBM3"}}
verify.write_models = lambda folder: None
verify.main(["--json", {str(file)!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    wait_until(lambda: pid.exists() and pid.read_text(), "the part runs")
    process.terminate()
    assert process.wait(60) != 0
    assert not Path(f"/proc/{pid.read_text()}").exists()
    outcomes = {part["name"]: part["outcome"] for part in json.loads(file.read_text())["parts"]}
    assert set(outcomes.values()) == {"not run"}


def test_documents_of_the_claims_exist() -> None:
    root = Path(__file__).parents[3]
    for part in verify.parts(Path("models")):
        assert (root / part.document).exists(), part.document


def test_results_stand_under_the_gpus_name() -> None:
    assert folder_of("NVIDIA H100 80GB HBM3") == "h100"
    assert folder_of("NVIDIA H200") == "h200"


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True).stdout


def test_commits_behind_the_newest_change_are_counted(tmp_path: Path) -> None:
    full, shallow = tmp_path / "full", tmp_path / "shallow"
    (full / "engine").mkdir(parents=True)
    git(tmp_path, "init", "-q", "full")
    commits = []
    for n, name in enumerate(("engine/a", "README", "engine/a", "README", "README")):
        (full / name).write_text(str(n))
        git(full, "add", "-A")
        git(full, "commit", "-q", "-m", "x", "--no-verify")
        commits.append(git(full, "rev-parse", "HEAD").strip())
    assert [commits_behind(commit, full) for commit in commits] == [2, 1, 0, 0, 0]
    assert commits_behind(commits[0][:12] + "+changes", full) == 2
    with pytest.raises(ValueError, match="run make verify-gpu"):
        commits_behind("0123abc", full)
    git(tmp_path, "clone", "-q", "--depth", "2", full.as_uri(), "shallow")
    assert commits_behind(commits[0], shallow) is None
    assert commits_behind(commits[-1], shallow) == 0


def test_each_result_is_recent() -> None:
    """At most 30 commits before the newest change under engine/ or kernels/."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("this is a copy without git, which cannot say how old a result is")
    files = sorted(verify.RESULTS.glob("*/verify.json"))
    if not files:
        pytest.skip("no GPU has written a verify.json yet: run make verify-gpu on one and commit its file")
    for file in files:
        commit = json.loads(file.read_text())["commit"]
        behind = commits_behind(commit, root)
        if behind is None:
            pytest.skip(f"this shallow clone does not reach back to {commit[:12]}, which {file.parent.name} was run at")
        assert behind <= 30, f"{file} is {behind} commits behind: run make verify-gpu"


def test_what_the_parts_serve_is_written(tmp_path: Path) -> None:
    verify.write_models(tmp_path)
    served = {word for part in verify.parts(tmp_path) for word in part.command if word.startswith(str(tmp_path))}
    assert served == {str(folder) for folder in tmp_path.iterdir()}
    assert all((Path(folder) / "config.json").exists() for folder in served)
