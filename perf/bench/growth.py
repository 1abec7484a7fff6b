"""How a decode step grows with rows, context and the size of the pool: GPU step and host work, as JSON lines and plots.

    python -m perf.bench.growth measure CHECKPOINT --json growth.jsonl [--rows 1 8 64 512] [--context 1024 131072]
    python -m perf.bench.growth plot growth.jsonl --png docs/images/growth.png

Steps are given to the runner as `perf.profile` does, each launched before the one before it is waited for. Rows grow at
512 tokens of context, context grows with one row, and the pool grows at 64 rows of 512: it should not matter. Host work
is the launch (planning for the device, staging, replay) and, in `engine ms`, what the engine does besides: scheduling,
committing and delivering, measured with `perf.bench.host`'s runner that computes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from perf.bench.engine import config_from
from perf.bench.host import steady
from perf.profile import Rows, host_time, run
from perf.provenance import provenance

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT = (1024, 4096, 16384, 32768, 65536, 131072)
POOL = (4096, 16384, 49152)
PLAIN = 512


def measure(
    model: str, settings: list[str], file: Path, rows: list[int], contexts: list[int], pools: list[int]
) -> None:
    """One runner for rows and contexts, one for each size of the pool."""
    longest = max([*contexts, PLAIN]) + 256
    common = [*settings, f"max_model_len={longest}", f"scheduler.max_rows={max([*rows, 64])}"]

    def point(runner: Any, axis: str, count: int, context: int, pool: int) -> None:
        run(runner, Rows(runner, count, context, 4), 4)
        figures = {
            "axis": axis,
            "rows": count,
            "context": context,
            "pool_blocks": pool,
            "step_ms": round(run(runner, Rows(runner, count, context, 24), 24) * 1e3, 4),
            "launch_ms": round(host_time(runner, Rows(runner, count, context, 12), 12) * 1e3, 4),
        }
        if axis == "rows":
            figures["engine_ms"] = round(steady(count, 60, PLAIN)["step"] * 1e-3, 4)
        print(figures, flush=True)
        with file.open("a") as out:
            out.write(json.dumps({"model": model, **figures, **provenance()}) + "\n")

    runner = _runner(model, common)
    blocks = runner.info.pool.num_blocks[0]
    for count in rows:
        point(runner, "rows", count, PLAIN, blocks)
    for context in contexts:
        point(runner, "context", 1, context, blocks)
    runner.close()
    for blocks in pools:
        runner = _runner(model, [*settings, "max_model_len=8192", f"cache.num_blocks={blocks}"])
        point(runner, "pool", 64, PLAIN, blocks)
        runner.close()


def _runner(model: str, settings: list[str]) -> Any:
    from engine.runner.build import build_runner

    runner = build_runner(config_from(model, settings))
    gc.collect()
    gc.freeze()
    return runner


def plot(file: Path, png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [json.loads(line) for line in file.read_text().splitlines()]
    labels = {
        "rows": ("rows", f"rows, each with {PLAIN} tokens"),
        "context": ("context", "tokens of context, one row"),
        "pool": ("pool_blocks", "blocks in the pool, 64 rows"),
    }
    there = [axis for axis in labels if any(p["axis"] == axis for p in points)]
    figure, axes = pyplot.subplots(1, len(there), figsize=(1 + 4.5 * len(there), 4), squeeze=False)
    for ax, axis in zip(axes[0], there, strict=True):
        key, label = labels[axis]
        of = sorted((p for p in points if p["axis"] == axis), key=lambda p: p[key])
        x = [p[key] for p in of]
        ax.plot(x, [p["step_ms"] for p in of], marker="o", label="step, GPU and host overlapped")
        ax.plot(x, [p["launch_ms"] for p in of], marker="s", label="launch, host")
        if all("engine_ms" in p for p in of):
            ax.plot(x, [p["engine_ms"] for p in of], marker="^", label="schedule, commit, deliver, host")
        ax.set_xscale("log", base=2)
        ax.set_xlabel(label)
        ax.set_ylabel("ms")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    figure.suptitle(f"A decode step of {Path(points[0]['model']).name}")
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("model", help="checkpoint folder")
    measuring.add_argument("--json", type=Path, required=True, help="append the points to this file")
    measuring.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    measuring.add_argument("--context", type=int, nargs="*", default=list(CONTEXT))
    measuring.add_argument("--pool", type=int, nargs="*", default=list(POOL), help="blocks")
    measuring.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    plotting = commands.add_parser("plot")
    plotting.add_argument("json", type=Path)
    plotting.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.model, args.set, args.json, args.rows, args.context, args.pool)
    else:
        plot(args.json, args.png)


if __name__ == "__main__":
    main()
