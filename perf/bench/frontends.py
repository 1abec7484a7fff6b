"""Responses a second by number of frontends: a server for each number, with the same load on it.

    python -m perf.bench.frontends measure FOLDER_OF_MODELS MODEL --json frontends.jsonl [--frontends 1 2 4 8]
    python -m perf.bench.frontends plot frontends.jsonl --png docs/images/frontends.png

The model should be so small that the frontends are what limits (`perf.shapes --layers 2`). A frontend that falls behind
puts several tokens into a response, so tokens/s can grow where responses/s cannot; with `--set stream_interval=8` it
does so on purpose.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from perf.bench.serving import GrpcTransport, measure
from perf.provenance import provenance
from perf.suite import GRPC, HTTP, memory, nereid_command, running
from perf.workload import parse

SPEC = "c=256:n=512:in=16:out=256:seed=300:w=4"


def point(model: Path, frontends: int, settings: list[str], spec: str, processes: int, log: Path) -> dict[str, Any]:
    """The figures of one server."""
    config = json.loads((model / "config.json").read_text())
    high = min(100_000, config["vocab_size"])
    with tempfile.TemporaryDirectory() as scratch:
        command = nereid_command(model, Path(scratch) / "repository", settings, frontends)
        with running(command, f"http://localhost:{HTTP}/v2/models/{model.name}/ready", log) as (server, _):
            transport = GrpcTransport(f"localhost:{GRPC}", model.name)
            measure(transport, parse("c=64:n=64:in=16:out=64:seed=1"), processes, high // 4, high)
            figures, _ = measure(transport, parse(spec), processes, high // 4, high)
            used = memory(server)
    figures["responses_per_s"] = round(figures["output_tokens_per_s"] / figures["tokens_per_event"], 1)
    return {"frontends": frontends, "settings": settings, **figures, "rss_mb": used["rss_mb"]}


def plot(file: Path, png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [json.loads(line) for line in file.read_text().splitlines()]
    plain = [p for p in points if not any("stream_interval" in s for s in p["settings"])]
    other = [p for p in points if p not in plain]
    figure, ax = pyplot.subplots(figsize=(6.5, 4.2))
    x = [p["frontends"] for p in plain]
    ax.plot(x, [p["responses_per_s"] for p in plain], marker="o", label="responses/s")
    ax.plot(x, [p["output_tokens_per_s"] for p in plain], marker="s", label="tokens/s")
    for p in other:
        interval = next(s for s in p["settings"] if "stream_interval" in s)
        ax.plot([p["frontends"]], [p["output_tokens_per_s"]], marker="*", ms=12, ls="", label=f"tokens/s, {interval}")
    ax.set_xlabel("frontends")
    ax.set_xticks(x)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend()
    ax.set_title(f"{plain[0]['spec']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("models", type=Path, help="folder of model folders")
    measuring.add_argument("model")
    measuring.add_argument("--json", type=Path, required=True, help="append the points to this file")
    measuring.add_argument("--frontends", type=int, nargs="+", default=[1, 2, 4, 8])
    measuring.add_argument("--spec", default=SPEC)
    measuring.add_argument("--processes", type=int, default=8, help="client processes")
    measuring.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    plotting = commands.add_parser("plot")
    plotting.add_argument("json", type=Path)
    plotting.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "plot":
        plot(args.json, args.png)
        return
    for frontends in args.frontends:
        log = args.json.with_suffix(".server.log")
        figures = point(args.models / args.model, frontends, args.set, args.spec, args.processes, log)
        with args.json.open("a") as out:
            out.write(json.dumps({"model": args.model, **figures, **provenance()}) + "\n")
        print(
            f"{frontends} frontends {args.set}: {figures['responses_per_s']:.0f} responses/s, "
            f"{figures['output_tokens_per_s']:.0f} tokens/s, {figures['tokens_per_event']} tokens a response, "
            f"client {figures['client_cpu_s']} s of CPU, failed {figures['failed']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
