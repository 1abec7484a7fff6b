"""NVIDIA's tests of its OpenAI frontend, over `nereid openai` and this server. The second part of `make test-peers`.

    python -m tests.peers.frontend [--server FOLDER] [--write docs/compatibility.md]

A folder is a checkout of triton-inference-server/server or a git directory; without one it is cloned from GitHub. Their
files are copied, not changed: `frontend_conftest.py` beside them starts the server. Exit status 1 when something failed
that is not in `FRONTEND_THEIRS`, each with its reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.peers.__main__ import Outcome, copied, put, table
from tests.peers.runs import FRONTEND_FILES, FRONTEND_NOT_RUN, FRONTEND_THEIRS

SERVER = "https://github.com/triton-inference-server/server"
MARK = "make test-peers, the frontend"
ERROR = "error in "
_PART = "python/openai"
_MODEL = "demo"
_MAX_S = 3600
_ROOT = Path(__file__).parents[2]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="", help="a checkout; cloned where it is empty")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    told = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="nereid-peers-") as name:
        checkout = copied(told.server or SERVER, Path(name) / "server", part=_PART)
        outcomes = run(checkout / _PART, Path(name) / "report.xml")
    page = table(outcomes)
    print(page)
    if told.write is not None:
        put(told.write, page, MARK)
    return int(any(why is None for outcome in outcomes for why in outcome.failures.values()))


def run(folder: Path, report: Path) -> list[Outcome]:
    """An outcome for each of their files."""
    shutil.copy(Path(__file__).with_name("frontend_conftest.py"), folder / "conftest.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += [f"--rootdir={folder}", f"--junitxml={report}", "-k", " and ".join(f"not {n}" for n in FRONTEND_NOT_RUN)]
    checkpoint = str(_ROOT / "model_repository/demo/checkpoint")
    told = {"TEST_BACKEND": "vllm", "TEST_MODEL": _MODEL, "TEST_TOKENIZER": checkpoint}
    told |= {"NEREID_PEERS_CWD": str(_ROOT), "NEREID_PEERS_CHECKPOINT": checkpoint}
    command += [f"tests/{name}" for name in FRONTEND_FILES]
    ended = subprocess.run(command, cwd=folder, env=os.environ | told, capture_output=True, text=True, timeout=_MAX_S)
    if not report.exists():
        raise SystemExit(f"the tests did not run:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    print(ended.stdout[-40_000:], file=sys.stderr)
    return outcomes(report.read_text())


def outcomes(report: str) -> list[Outcome]:
    """pytest's report in JUnit's form, by file. Tests that their own marks skip count nowhere."""
    passed: Counter[str] = Counter()
    failed: dict[str, list[str]] = {}
    for case in ET.fromstring(report).iter("testcase"):
        _, file, *group = case.attrib["classname"].split(".")
        failed.setdefault(file, [])
        if case.find("skipped") is not None:
            continue
        name = "::".join((*group, case.attrib["name"]))
        if case.find("error") is not None:  # a server that did not start, which no reason is known of
            failed[file].append(f"{ERROR}{name}")
        elif case.find("failure") is not None:
            failed[file].append(name)
        else:
            passed[file] += 1
    return [
        Outcome(f"pytest {_PART}/tests/{file}.py", passed[file], passed[file] + len(names), _reasons(file, names))
        for file, names in failed.items()
    ]


def _reasons(file: str, names: Iterable[str]) -> dict[str, str | None]:
    """Tests with their parameters counted, not named -> why."""
    grouped: dict[tuple[str, str | None], list[str]] = {}
    for name in names:
        known = () if name.startswith(ERROR) else FRONTEND_THEIRS
        why = next((why for part, why in known if re.search(part, f"{file}::{name}")), None)
        test = name if why is None else name.rpartition("::")[2]
        grouped.setdefault((test if why is None else test.partition("[")[0], why), []).append(test)
    found: dict[str, str | None] = {}
    for (short, why), tests in grouped.items():
        if sum(name == short for name, _ in grouped) > 1:  # its parameters fail for several reasons
            found |= dict.fromkeys(tests, why)
        else:
            found[f"{short} ({len(tests)})" if len(tests) > 1 else short] = why
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
