"""`make perf-smoke`: perf_analyzer and locust against a server of their own, a few seconds each, no failure allowed.

python -m perf.load.smoke [--seconds 5] [--model demo]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clients.python.local_server import LocalServer, ServerFailed
from clients.python.timing import percentile
from perf.load import perf_analyzer

PROMPT = "A server takes a question and gives back an answer, one word after another. "
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
KINDS = ("TTFT", "ITL", "E2E")
WAYS = {"GrpcStreamUser": "gRPC stream", "GenerateStreamUser": "HTTP generate_stream"}


class SmokeFailed(Exception):
    """A load tool failed or saw a failure; the message says what it printed."""


def smoke(server: LocalServer, model: str, seconds: int, console: Console) -> None:
    """Run both tools and print their tables. Raises SmokeFailed or PerfAnalyzerError."""
    profile = perf_analyzer.run(server.grpc, model, concurrency=4, requests=16, prompt=PROMPT, max_tokens=8)
    console.print(perf_analyzer.table([profile]))
    console.print(table(locust(server, model, seconds, WAYS, ["--words", "16", "--max-tokens", "8"])))


def locust(
    server: LocalServer, model: str, seconds: int, ways: Mapping[str, str], flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """locust's own figures, a row a kind and way, of four users for `seconds`. Raises SmokeFailed.

    ways: user class -> what it calls its requests.
    """
    command = [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *ways,
        "--headless", "--users", "4", "--spawn-rate", "4", "--run-time", f"{seconds}s", "--stop-timeout", "60",
        "--host", f"http://{server.http}", "--grpc", server.grpc, "--llm", model, *flags, "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SmokeFailed(f"locust ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    entries: list[dict[str, Any]] = json.loads(done.stdout)
    missing = {(kind, way) for kind in KINDS for way in ways.values()} - {(e["method"], e["name"]) for e in entries}
    failures = sum(entry["num_failures"] for entry in entries)
    if missing or failures:
        raise SmokeFailed(f"locust saw {failures} failures and measured nothing of {sorted(missing)}:\n{done.stderr}")
    return sorted(entries, key=lambda entry: (KINDS.index(entry["method"]), entry["name"]))


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    out = Table("what", "over", "count", "p50", "p95", "p99", title="locust", caption="times in ms; 0 failures")
    for entry in entries:
        times = [f"{from_counts(entry['response_times'], p):.0f}" for p in (50, 95, 99)]
        out.add_row(entry["method"], entry["name"], str(entry["num_requests"]), *times)
    return out


def from_counts(counts: dict[str, int], p: float) -> float:
    """Of locust's table of rounded times (ms) and how often each was seen."""
    return percentile([float(ms) for ms, count in counts.items() for _ in range(count)], p)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    console = Console(width=120)
    try:
        with LocalServer() as server:
            smoke(server, args.model, args.seconds, console)
    except (ServerFailed, SmokeFailed, perf_analyzer.PerfAnalyzerError) as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        return 1
    console.print("perf-smoke passed: 0 failures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
