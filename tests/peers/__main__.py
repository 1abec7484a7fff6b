"""`make test-peers`: clients and tests of vllm_backend and TensorRT-LLM, unchanged but for ports, against this server.

    python -m tests.peers [--vllm-backend FOLDER] [--tensorrt-llm FOLDER] [--write docs/compatibility.md]

A folder is a checkout or a git directory; without one the repository is cloned from GitHub. Both are copied first, and
nothing is written into them. Exit status 1 when something failed that is not in `THEIRS`, each with its reason.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clients.python.local_server import LocalServer
from engine.serving.launch import repository
from tests.peers.runs import (
    ADD_SUB_CONFIG,
    ADD_SUB_MODEL,
    CLIENT_RUNS,
    ENDS_AT_THE_SECOND_REQUEST,
    SAMPLE_RUNS,
    SETUPS,
    THEIRS,
    Setup,
    TestFile,
)

VLLM_BACKEND = "https://github.com/triton-inference-server/vllm_backend"
TENSORRT_LLM = "https://github.com/NVIDIA/TensorRT-LLM"
MARK = "make test-peers"
_MAX_S = 3600
_MANY = 100
_PYTEST = ("-p", "no:cacheprovider", "-c", "/dev/null")


class Outcome(msgspec.Struct, frozen=True):
    """What one run of a peer's file gave. failures: test or run -> why; those without a reason are ours."""

    run: str
    passed: int
    total: int
    failures: dict[str, str | None]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-backend", default="", help="a checkout; cloned where it is empty")
    parser.add_argument("--tensorrt-llm", default="", help="a checkout with inflight_batcher_llm/client in it")
    parser.add_argument("--every", type=int, default=1, help="of a file of more than 100 tests, one of so many")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    told = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="nereid-peers-") as name:
        root = Path(name)
        vllm = copied(told.vllm_backend or VLLM_BACKEND, root / "vllm_backend")
        trt = copied(told.tensorrt_llm or TENSORRT_LLM, root / "tensorrt_llm", part="triton_backend")
        outcomes = [o for n, setup in enumerate(SETUPS) for o in served(root / str(n), vllm, setup, told.every)]
        models = prepared(root / "models", vllm, {})
        with LocalServer(models, ready_s=300.0) as server:
            with_ports(root, server)
            outcomes += [samples(vllm), clients(trt)]
    page = table(joined(outcomes))
    print(page)
    if told.write is not None:
        put(told.write, page)
    return int(any(reason is None for outcome in outcomes for reason in outcome.failures.values()))


def copied(source: str, target: Path, part: str = "") -> Path:
    """A copy of a checkout, of a git directory's HEAD, or of what GitHub has; of that, only the folder `part`."""
    folder = Path(source)
    if source.startswith("https://"):
        command = ["git", "clone", "-q", "--depth=1", "--filter=blob:none", *(["--sparse"] if part else []), source]
        subprocess.run([*command, str(target)], check=True)
        if part:
            subprocess.run(["git", "-C", str(target), "sparse-checkout", "set", part], check=True)
    elif (folder / "HEAD").is_file():
        subprocess.run(["git", "clone", "-q", str(folder), str(target)], check=True)
    elif folder.is_dir():
        shutil.copytree(folder, target)
    else:
        raise SystemExit(f"{source} is neither a folder nor an address: give a checkout")
    return target


def served(folder: Path, vllm: Path, setup: Setup, every: int) -> Iterator[Outcome]:
    """Outcomes of the files of `setup`, in a copy of vllm_backend's checkout and against a server of its own."""
    copy = copied(str(vllm), folder / "vllm_backend")
    models = prepared(folder / "models", vllm, setup.parameters)
    variables = {}
    if setup.ends:
        (folder / "sitecustomize.py").write_text(ENDS_AT_THE_SECOND_REQUEST)
        variables["PYTHONPATH"] = f"{folder}:{Path.cwd()}"
    with LocalServer(models, ready_s=300.0, flags=setup.flags, variables=variables) as server:
        with_ports(copy, server)
        for file in setup.files:
            yield tests(copy, file, every, server)


def joined(outcomes: list[Outcome]) -> list[Outcome]:
    """One for each run, where a file was run against several servers."""
    found: dict[str, Outcome] = {}
    for new in outcomes:
        had = found.get(new.run, Outcome(new.run, 0, 0, {}))
        found[new.run] = Outcome(new.run, had.passed + new.passed, had.total + new.total, had.failures | new.failures)
    return list(found.values())


def prepared(models: Path, vllm: Path, parameters: dict[str, str]) -> Path:
    """A model repository with the names that the peers' files ask for, over the demo checkpoint: it is trained, for
    tests want sentences. With `parameters`, of which those of the model vllm_opt are made, there is no other."""
    settings = {"model": str(Path("model_repository/demo/checkpoint").resolve())}
    repository.write_llm(models, "vllm_opt", settings | parameters, 1)
    if parameters:
        return models
    repository.write_llm(models, "vllm_load_test", settings, 1)
    repository.write_tokenizer(models, "tokenizer", settings)
    repository.write_tensorrt_llm(models, "vllm_opt", settings, settings)
    (models / "ensemble_model/1").mkdir(parents=True)
    shutil.copy(vllm / "ci/L0_backend_vllm/vllm_backend/ensemble_config.pbtxt", models / "ensemble_model/config.pbtxt")
    (models / "add_sub/1").mkdir(parents=True)
    (models / "add_sub/config.pbtxt").write_text(ADD_SUB_CONFIG)
    (models / "add_sub/1/model.py").write_text(ADD_SUB_MODEL)
    return models


def with_ports(root: Path, server: LocalServer) -> None:
    """Write this server's ports into the copies: the only change."""
    for file in root.rglob("*.py"):
        text = file.read_text(errors="surrogateescape")
        new = text.replace("localhost:8001", server.grpc)
        new = new.replace(":8002/metrics", f":{server.metrics.rpartition(':')[2]}/metrics")
        if new != text:
            file.write_text(new, errors="surrogateescape")


def tests(vllm: Path, wanted: TestFile, every: int, server: LocalServer) -> Outcome:
    """A file of vllm_backend's tests in its own folder, as its test.sh runs it: unittest's by themselves."""
    file = vllm / wanted.name
    if wanted.log:
        (file.parent / wanted.log).symlink_to(server.log_file)
    by_itself = "unittest.main()" in file.read_text()
    command = [sys.executable, file.name, "-v"] if by_itself else [sys.executable, "-m", "pytest", "-v", *_PYTEST]
    run = f"{'python' if by_itself else 'pytest'} {wanted.name}"
    if by_itself:
        command += wanted.tests
    else:
        command.append(f"--rootdir={file.parent}")
        chosen = [f"{file.name}::{test}" for test in wanted.tests] or [file.name]
        known = collected(file) if every > 1 else []
        if len(known) > _MANY:
            chosen, run = known[::every], f"{run} ({len(known[::every])} of its {len(known):,} tests)"
        command += chosen
    ended = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=_MAX_S)
    said = ended.stderr if by_itself else ended.stdout
    passed, failed = unittest_results(said) if by_itself else pytest_results(said)
    if not (passed or failed):
        raise SystemExit(f"{wanted.name} did not run:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    if failed:
        print(wanted.name, said[-6000:], sep="\n", file=sys.stderr)
    return Outcome(run, len(passed), len(passed) + len(failed), {t: reason(f"{wanted.name}::{t}") for t in failed})


def collected(file: Path) -> list[str]:
    """The ids of a file's tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *_PYTEST, f"--rootdir={file.parent}", file.name]
    said = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=_MAX_S).stdout
    return re.findall(r"^\S+::\S+$", said, re.MULTILINE)


def pytest_results(said: str) -> tuple[list[str], list[str]]:
    """(tests that passed, tests that did not) in what `pytest -v` said."""
    found = re.findall(r"^\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", said, re.MULTILINE)
    return [n for n, word in found if word == "PASSED"], [n for n, word in found if word != "PASSED"]


def unittest_results(said: str) -> tuple[list[str], list[str]]:
    """The same in what unittest said with -v. A test's own words may stand before the verdict."""
    tests = re.findall(r"^(test_\w+) \(", said, re.MULTILINE)
    bad = set(re.findall(r"^(?:FAIL|ERROR): (test_\w+) \(", said, re.MULTILINE))
    every = list(dict.fromkeys(tests))
    return [n for n in every if n not in bad], [n for n in every if n in bad]


def samples(vllm: Path) -> Outcome:
    """vllm_backend's samples/client.py with its flags; a refusal that vllm_backend gives too counts as passed."""
    failures: dict[str, str | None] = {}
    for flags, refused in SAMPLE_RUNS:
        command = [sys.executable, "client.py", "-m", "vllm_opt", *flags]
        ended = subprocess.run(command, cwd=vllm / "samples", capture_output=True, text=True, timeout=_MAX_S)
        well = refused in ended.stdout + ended.stderr if refused else "PASS" in ended.stdout
        if not well:
            failures[" ".join(flags) or "without flags"] = reason(f"samples {' '.join(flags)}")
            print(ended.stdout[-1500:], ended.stderr[-1500:], file=sys.stderr)
    return Outcome("python samples/client.py", len(SAMPLE_RUNS) - len(failures), len(SAMPLE_RUNS), failures)


def clients(trt: Path) -> Outcome:
    """TensorRT-LLM's end_to_end_grpc_client.py with each of its flags."""
    found = sorted(trt.rglob("inflight_batcher_llm/client/end_to_end_grpc_client.py"))
    if not found:
        raise SystemExit(f"{trt} has no inflight_batcher_llm/client/end_to_end_grpc_client.py")
    failures: dict[str, str | None] = {}
    for prompt, flags in CLIENT_RUNS:
        command = [sys.executable, found[0].name, "-p", prompt, "-o", "12", *flags]
        ended = subprocess.run(command, cwd=found[0].parent, capture_output=True, text=True, timeout=_MAX_S)
        if ended.returncode or "Received an error" in ended.stdout:
            failures[" ".join(flags) or "without flags"] = reason(f"client {' '.join(flags)}")
            print(flags, ended.stdout[-800:], ended.stderr[-800:], file=sys.stderr)
    run = "python inflight_batcher_llm/client/end_to_end_grpc_client.py"
    return Outcome(run, len(CLIENT_RUNS) - len(failures), len(CLIENT_RUNS), failures)


def reason(place: str) -> str | None:
    return next((why for part, why in THEIRS.items() if part in place), None)


def table(outcomes: list[Outcome]) -> str:
    lines = ["| Run | Passed | What did not, and why |", "|---|---|---|"]
    for outcome in outcomes:
        reasons: dict[str, list[str]] = {}
        for name, why in outcome.failures.items():
            reasons.setdefault(why or "not explained", []).append(f"`{name}`")
        told = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        lines.append(f"| `{outcome.run}` | {outcome.passed} of {outcome.total} | {told} |")
    return "\n".join(lines) + "\n"


def put(page: Path, text: str, mark: str = MARK) -> None:
    """Replace what stands between the marks of `page`."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no place for the table: put {begin.strip()} and {end.strip()} into it")
    page.write_text(before + begin + text + end + after)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
