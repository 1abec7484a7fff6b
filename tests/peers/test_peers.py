"""How `make test-peers` takes checkouts and reports; the runs themselves need the peers' files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.peers import __main__ as peers
from tests.peers import frontend


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
    page.write_text("before\n<!-- make test-peers: begin -->\nold\n<!-- make test-peers: end -->\nafter\n")
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


def test_pytests_report_is_read_by_file_and_skipped_tests_count_nowhere() -> None:
    def case(name: str, inside: str = "", group: str = "TestA") -> str:
        return f'<testcase classname="tests.test_completions.{group}" name="{name}">{inside}</testcase>'

    cases = case("test_a") + case("test_b[x y]", "<failure/>") + case("test_echo[True]", "<skipped/>")
    cases += "".join(case(f"test_completions_invalid_sampling_parameters[{n}]", "<failure/>") for n in range(2))
    cases += case("test_completions_defaults", "<error/>").replace("test_completions.TestA", "test_new.TestB")
    first, second = frontend.outcomes(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert (first.run, first.passed, first.total) == ("pytest python/openai/tests/test_completions.py", 1, 4)
    ours, theirs = first.failures.items()
    assert ours == ("TestA::test_b[x y]", None)
    assert theirs[0] == "test_completions_invalid_sampling_parameters (2)"
    assert "422" in (theirs[1] or "")
    assert (second.passed, second.failures) == (0, {"error in TestB::test_completions_defaults": None})


def test_the_two_tables_of_a_page_have_marks_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- make test-peers: begin -->\n1\n<!-- make test-peers: end -->\n"
        "<!-- make test-peers, the frontend: begin -->\n2\n<!-- make test-peers, the frontend: end -->\n"
    )
    peers.put(page, "new\n", frontend.MARK)
    assert "-->\n1\n<!--" in page.read_text()
    assert "begin -->\nnew\n<!-- make test-peers, the frontend: end" in page.read_text()
