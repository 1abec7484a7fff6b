"""A report of load on a server of its own: perf_analyzer over several numbers of streams, then every locust user.

    python -m perf.load.report FOLDER [--seconds 30] [--streams 1 2 4 8]

FOLDER gets report.md, perf_analyzer.json, perf_analyzer.png, locust.json and locust.png. The model is the demo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from clients.python.local_server import LocalServer, free_ports
from perf.bench.shim import wait_for
from perf.load import perf_analyzer, smoke
from perf.provenance import processor, provenance

USERS = {
    "GrpcStreamUser": "gRPC stream",
    "GenerateStreamUser": "HTTP generate_stream",
    "OpenAIChatUser": "OpenAI chat",
    "SharedPrefixChatUser": "OpenAI chat, shared prefix",
}
WORDS, TOKENS = 32, 32


@contextmanager
def shim(server: LocalServer) -> Iterator[str]:
    """A shim before `server`; its host:port."""
    (port,) = free_ports(1)
    flags = ["--port", str(port), "--triton", f"{server.grpc}:{server.metrics.rsplit(':', 1)[1]}"]
    process = subprocess.Popen([sys.executable, "-m", "clients.openai", *flags, "--log-level", "error"])
    try:
        wait_for(f"http://127.0.0.1:{port}", process.pid)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def plot(entries: Sequence[Mapping[str, Any]], png: Path) -> None:
    """A bar a way for the median and the 95th percentile of TTFT, ITL and E2E."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(smoke.KINDS), figsize=(12, 3.6))
    for axes, kind in zip(panels, smoke.KINDS, strict=True):
        mine = [entry for entry in entries if entry["method"] == kind]
        names = [entry["name"] for entry in mine]
        for offset, p in ((-0.2, 50), (0.2, 95)):
            times = [smoke.from_counts(entry["response_times"], p) for entry in mine]
            axes.barh([place + offset for place in range(len(mine))], times, height=0.38, label=f"p{p}")
        axes.set_yticks(range(len(mine)), names if kind == smoke.KINDS[0] else [])
        axes.set_xlabel(f"{kind}, ms")
        axes.grid(alpha=0.3, axis="x")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def markdown(table: Table) -> str:
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    heads = [str(column.header) for column in table.columns]
    rows = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *zip(*cells, strict=True))]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=30, help="of locust")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8], help="of perf_analyzer")
    parser.add_argument("--requests", type=int, default=40, help="of perf_analyzer, a number of streams")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    made, where = provenance(), f"{processor()}, load average {os.getloadavg()[0]:.1f} at the start"
    with LocalServer() as server, shim(server) as openai:
        profiles = [
            perf_analyzer.run(
                server.grpc, "demo", concurrency=n, requests=args.requests, prompt=smoke.PROMPT, max_tokens=TOKENS
            )
            for n in args.streams
        ]
        flags = ["--openai", openai, "--words", str(WORDS), "--max-tokens", str(TOKENS)]
        entries = smoke.locust(server, "demo", args.seconds, USERS, flags)
    (args.folder / "perf_analyzer.json").write_bytes(msgspec.json.encode(profiles))
    (args.folder / "locust.json").write_text(json.dumps(entries, indent=1) + "\n")
    perf_analyzer.plot(profiles, args.folder / "perf_analyzer.png")
    plot(entries, args.folder / "locust.png")
    tables = perf_analyzer.table(profiles), smoke.table(entries)
    text = f"""# Load on the demo model, on a CPU

`python -m perf.load.report {args.folder} --seconds {args.seconds}` at commit {made["commit"][:12]},
Python {made["python"]}, {where}; the load tools ran on the same cores. Times in milliseconds; no request failed.

## perf_analyzer: gRPC streams, {len(smoke.PROMPT.split())} words in, {TOKENS} tokens out

{markdown(tables[0])}

![](perf_analyzer.png)

## locust: a user of each kind for {args.seconds} s, {WORDS} words in, {TOKENS} tokens out, one request after the other

{markdown(tables[1])}

![](locust.png)
"""
    (args.folder / "report.md").write_text(text)
    Console().print(*tables, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
