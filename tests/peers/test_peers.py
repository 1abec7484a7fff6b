"""How `make test-peers` takes checkouts and reports; the runs themselves need the peers' files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.peers import __main__ as peers


def test_a_checkout_is_copied_and_only_ports_are_changed(tmp_path: Path) -> None:
    given = tmp_path / "given"
    (given / "ci").mkdir(parents=True)
    text = 'url = "localhost:8001"\nr = get(f"http://{host}:8002/metrics")\nlimit = 8001\n'
    (given / "ci/a_test.py").write_text(text)
    copy = peers.copied(str(given), tmp_path / "root/copy")
    peers.with_ports(tmp_path / "root", SimpleNamespace(grpc="127.0.0.1:7", metrics="127.0.0.1:9"))  # type: ignore[arg-type]
    changed = 'url = "127.0.0.1:7"\nr = get(f"http://{host}:9/metrics")\nlimit = 8001\n'
    assert (copy / "ci/a_test.py").read_text() == changed
    assert (given / "ci/a_test.py").read_text() == text


def test_a_git_directory_is_taken_at_its_head(tmp_path: Path) -> None:
    work, bare = tmp_path / "work", tmp_path / "bare"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", str(work)], check=True)
    (work / "file").write_text("x")
    subprocess.run([*git, "-C", str(work), "add", "-A"], check=True)
    subprocess.run([*git, "-C", str(work), "commit", "-qm", "m"], check=True)
    subprocess.run([*git, "clone", "-q", "--bare", str(work), str(bare)], check=True)
    assert (peers.copied(str(bare), tmp_path / "copy") / "file").read_text() == "x"
    with pytest.raises(SystemExit, match="neither a folder nor an address"):
        peers.copied(str(tmp_path / "nothing"), tmp_path / "other")


def test_the_table_replaces_the_one_before_and_says_why(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{peers._BEGIN}old\n{peers._END}after\n")
    failures = {"test_a": "their words", "test_b": "their words", "test_c": None}
    text = peers.table([peers.Outcome("pytest x", 5, 8, failures), peers.Outcome("client", 2, 2, {})])
    peers.put(page, text)
    assert "| `pytest x` | 5 of 8 | `test_a`, `test_b`: their words; `test_c`: not explained |" in page.read_text()
    assert "| `client` | 2 of 2 |  |" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().startswith("before")
    assert page.read_text().endswith("after\n")
    with pytest.raises(SystemExit, match="no place for the table"):
        peers.put(Path(__file__), text)


def test_every_reason_belongs_to_something_that_is_run() -> None:
    runs = [f"client {' '.join(flags)}" for _, flags in peers.CLIENT_RUNS]
    for part in peers.THEIRS:
        assert part.startswith("test_") or any(part in run for run in runs), part


def test_verdicts_are_read_as_pytest_and_unittest_say_them() -> None:
    told = (
        "a.py::TestA::test_x[1-True] PASSED [ 50%]\na.py::TestA::test_y FAILED [100%]\nFAILED a.py::TestA::test_y - x"
    )
    assert peers.pytest_results(told) == (["test_x[1-True]"], ["test_y"])
    told = "test_a (m.T.test_a)\nIts words ... ok\ntest_b (m.T.test_b) ... FAIL\n\nFAIL: test_b (m.T.test_b)\nRan 2"
    assert peers.unittest_results(told) == (["test_a"], ["test_b"])
