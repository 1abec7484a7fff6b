"""Every claim of the documents that a GPU can say yes or no to, in under 10 minutes: `make verify-gpu`.

    python -m perf.check.verify [--leave-out recovery] [--only invariance] [--json perf/results/h200/verify.json]

Parts run in two lanes side by side: engines and the sanitizer, and cases of kernels and families. A part that fails or
takes longer than it may does not keep the others from running. Outcomes go to one file with the commit, written
whenever one is known, which the documents cite and `tests/perf/check/test_verify.py` holds to be recent. A part that
is not asked for keeps what the file says of it, when that is of the same commit and GPU. Exits with 1 unless all
passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf import shapes
from perf.check.invariance import LOADS
from perf.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results"
MODEL = "qwen3-4b"
# Of a quantized model so many layers are as good a claim as all.
QUANTIZED_LAYERS = 4
# Folders whose changes may make a claim untrue.
CLAIMED = ("engine", "kernels")
# Of what a part prints, the end that is kept, in characters.
KEPT = 8000
# Seconds that a part has at its limit to say how far it came.
LAST_WORDS_S = 20


@dataclass(frozen=True)
class Part:
    """A claim, where it stands, the command that says yes by its exit status, and the seconds that it may take.

    lane: those of the same run one after the other.
    """

    name: str
    claim: str
    document: str
    command: tuple[str, ...]
    limit_s: float
    lane: str = "engines"


@dataclass(frozen=True)
class Outcome:
    """outcome: passed, failed, too slow, left out, or not run (yet). said: the end of what the command printed."""

    name: str
    claim: str
    document: str
    command: str
    outcome: str
    seconds: float
    said: str

    @property
    def line(self) -> str:
        return f"{self.name:<16} {self.outcome:<9} {self.seconds:6.1f} s  {self.claim}"


def write_models(folder: Path) -> None:
    """What the parts serve."""
    shapes.write(folder, MODEL)
    for quantization in shapes.QUANTIZATIONS:
        shapes.write(folder, MODEL, QUANTIZED_LAYERS, None, quantization)


def parts(models: Path) -> list[Part]:
    """The parts, of a folder with the models; those of a lane in the order in which they run: the last may take what
    the others leave."""
    cores = len(os.sched_getaffinity(0))
    report = ("--tb", "short", "--maxfail", "10", "--durations", "10")
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "--dist", "loadgroup", *report)
    cases = ("tests/kernels/test_ops.py", "-k", "gives_what_the_reference")
    # The other lane has cases of 70 GB, beside those of other processes.
    settings = ("--set", "load_format=dummy", "--set", "cache.memory_fraction=0.2")
    dummy = (str(models / MODEL), *settings)
    correctness, performance = "docs/correctness.md", "docs/performance.md"
    return [
        Part(
            "invariance",
            "deterministic: equal bits alone, together, behind a prefix, beside 64 and 256 rows",
            performance,
            ("-m", "perf.check.invariance", *dummy, "--only-on"),
            150,
        ),
        *(
            Part(
                f"invariance-{name}",
                f"deterministic: the same of {QUANTIZED_LAYERS} layers of {name} weights, beside 64 rows",
                performance,
                (
                    "-m",
                    "perf.check.invariance",
                    str(models / f"{MODEL}-{name}"),
                    *settings,
                    "--only-on",
                    "--load",
                    LOADS[0],
                ),
                40,
            )
            for name in shapes.QUANTIZATIONS
        ),
        Part(
            "recovery",
            "kill -9 of the engine: no stream loses, repeats or changes a token",
            "docs/architecture.md",
            ("-m", "perf.check.recovery", *dummy),
            120,
        ),
        Part(
            "compiles",
            "no kernel is compiled once the engine is ready",
            performance,
            ("-m", "perf.check.late_compiles", *dummy),
            90,
        ),
        Part(
            "sanitizer",
            "compute-sanitizer: no read or write outside of a tensor",
            correctness,
            ("-m", "perf.check.sanitize", "--tools", "memcheck"),
            180,
        ),
        Part(
            "kernels",
            "every case of every op, compiled",
            correctness,
            (*pytest, "-n", str(min(12, cores)), *cases),
            240,
            "cases",
        ),
        Part(
            "gate",
            "every family agrees with transformers",
            correctness,
            (*pytest, "-n", str(cores), "--device", "cuda", "tests/gate", "--ignore", "tests/gate/test_server.py"),
            380,
            "cases",
        ),
    ]


class Parts:
    """Runs parts, with what they start. end: when all of them are to have ended (seconds of time.monotonic)."""

    def __init__(self, end: float) -> None:
        self._end = end
        self._closed = False
        self._open: set[subprocess.Popen[str]] = set()

    def outcome(self, part: Part) -> Outcome:
        """Runs one part and ends all of it at its limit, or LAST_WORDS_S later."""
        if self._closed:
            return told(part, "not run")
        limit_s = min(part.limit_s, self._end - time.monotonic())
        if limit_s <= 0:
            return told(part, "too slow", "the parts before it took all of the time")
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                [sys.executable, *part.command], stdout=out, stderr=subprocess.STDOUT, start_new_session=True, text=True
            )
            self._open.add(process)
            try:
                found = "passed" if process.wait(limit_s) == 0 else "failed"
            except subprocess.TimeoutExpired:
                found = "too slow"
                process.send_signal(signal.SIGINT)  # pytest then says what failed, and what took its time
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
            finally:
                _kill(process)  # also what a part left behind
                self._open.discard(process)
            out.seek(0)
            said = out.read()[-KEPT:]
        return told(part, "not run" if self._closed else found, said, round(time.monotonic() - began, 1))

    def close(self) -> None:
        """Ends what runs; nothing more is begun."""
        self._closed = True
        for process in list(self._open):
            _kill(process)


class Report:
    """The file of outcomes, by the names of their parts. Safe to use from any thread."""

    def __init__(self, file: Path, facts: Mapping[str, Any], outcomes: dict[str, Outcome]) -> None:
        self._file, self._facts, self._outcomes = file, facts, outcomes
        self._lock = threading.Lock()
        self._write()

    def add(self, done: Outcome) -> None:
        with self._lock:
            if done.outcome != "passed":
                print(f"== {done.name}: {done.command}\n{done.said}", flush=True)
            print(done.line, flush=True)
            self._outcomes[done.name] = done
            self._write()

    def _write(self) -> None:
        held = {**self._facts, "parts": [asdict(one) for one in self._outcomes.values()]}
        made = self._file.with_suffix(".new")
        made.write_text(json.dumps(held, indent=1) + "\n")
        made.replace(self._file)


def known(file: Path, facts: Mapping[str, Any]) -> dict[str, Outcome]:
    """What a file says of parts that ran, when it is of the same commit and GPU."""
    if not file.exists():
        return {}
    held = json.loads(file.read_text())
    if any(held.get(key) != facts[key] for key in ("commit", "gpu")):
        return {}
    made = [Outcome(**part) for part in held["parts"]]
    return {one.name: one for one in made if one.outcome not in ("left out", "not run")}


def told(part: Part, found: str, said: str = "", seconds: float = 0.0) -> Outcome:
    command = " ".join(("python", *part.command))
    return Outcome(part.name, part.claim, part.document, command, found, seconds, said)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_lane(lane: Sequence[Part], runs: Parts, report: Report) -> None:
    for part in lane:
        report.add(runs.outcome(part))


def folder_of(gpu: str) -> str:
    """Of results of a GPU: "NVIDIA H100 80GB HBM3" → "h100"."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0].lower()


def commits_behind(commit: str, root: Path) -> int | None:
    """Commits between `commit` and the newest change of what is claimed about, in the checkout at `root`; None where a
    shallow clone does not reach back to it.

    Raises ValueError when a full clone has no such commit.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    commit = commit.partition("+")[0]
    try:
        git("cat-file", "-e", f"{commit}^{{commit}}")
        reached = git("merge-base", commit, "HEAD") == git("rev-parse", commit)
    except ValueError:
        reached = False
    if not reached:
        if git("rev-parse", "--is-shallow-repository") == "true":
            return None
        raise ValueError(f"commit {commit} is not among those that led here: run make verify-gpu and commit its file")
    newest = git("rev-list", "-1", "HEAD", "--", *CLAIMED)
    return int(git("rev-list", "--count", f"{commit}..{newest}"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument(
        "--leave-out", nargs="+", default=[], metavar="PART", help="a failure, unless the file has it as passed"
    )
    parser.add_argument("--limit", type=float, default=570, help="seconds for all parts together")
    parser.add_argument("--json", type=Path, help="default: perf/results/GPU/verify.json")
    given = parser.parse_args(arguments)
    facts = provenance()
    if "gpu" not in facts:
        parser.error("this machine has no GPU that nvidia-smi names, and these claims are about one")
    file = given.json or RESULTS / folder_of(facts["gpu"]) / "verify.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what runs ends with it
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch))
        all_parts = parts(Path(scratch))
        unknown = {*given.only, *given.leave_out} - {part.name for part in all_parts}
        if unknown:
            parser.error(f"no part is called {', '.join(sorted(unknown))}: use {', '.join(p.name for p in all_parts)}")
        left_out = {p.name for p in all_parts if p.name in given.leave_out or (given.only and p.name not in given.only)}
        outcomes = {p.name: told(p, "left out" if p.name in left_out else "not run") for p in all_parts}
        outcomes |= {name: held for name, held in known(file, facts).items() if name in left_out}
        report = Report(file, facts, outcomes)
        runs = Parts(time.monotonic() + given.limit)
        lanes: dict[str, list[Part]] = {}
        for part in all_parts:
            if part.name not in left_out:
                lanes.setdefault(part.lane, []).append(part)
        began = time.monotonic()
        with ThreadPoolExecutor(max(1, len(lanes))) as threads:
            try:
                waiting = [threads.submit(run_lane, lane, runs, report) for lane in lanes.values()]
                for lane in waiting:
                    lane.result()
            except BaseException:
                runs.close()
                raise
    print(f"\n{facts['commit'][:12]} on {facts['gpu']}, {time.monotonic() - began:.0f} s: {file}")
    for one in outcomes.values():
        print(one.line)
    return 0 if all(one.outcome == "passed" for one in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
