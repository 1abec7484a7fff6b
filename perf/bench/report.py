"""Results of `perf.suite` as a table and as plots: ours beside a peer's.

    python -m perf.bench.report OURS.jsonl PEER.jsonl [--png FILE]          of perf/results/h200, for example

The table has a line a row and a column a file. The plots need matplotlib: throughput of the closed-loop rows against
time to first token and against the 99th percentile of the gaps between tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Figures = dict[str, dict[str, Any]]


def read(file: Path) -> Figures:
    """Figures by row; of a row that was measured several times the first counts, as on an empty cache."""
    rows: Figures = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        rows.setdefault(record["row"], record)
    return rows


def cell(row: str, figures: dict[str, Any] | None) -> str:
    """What a row is about: latency where one request runs, throughput where many do."""
    if figures is None:
        return "not measured"
    if row == "start":
        return f"ready after {figures['ready_s']:.1f} s"
    if row == "memory":
        return f"{figures['rss_mb']:,} MB"
    ttft, tpot, itl = figures["ttft_ms"], figures["tpot_ms"], figures["itl_ms"]
    if figures["failed"]:
        return f"{figures['failed']} of {figures['requests']} failed"
    if figures["rate"] is not None:
        return (
            f"TPOT {tpot['p50']:.2f}{spread(figures, 'tpot_ms', '.2f')}, "
            f"ITL p99 {itl['p99']:.1f}{spread(figures, 'itl_ms', '.1f', 'p99')}, "
            f"TTFT {ttft['p50']:.1f}{spread(figures, 'ttft_ms', '.1f')} ms"
        )
    if tpot is None:
        return f"TTFT {ttft['p50']:.1f}{spread(figures, 'ttft_ms', '.1f')} ms"
    if figures["in_flight"] == 1:
        return f"TPOT {tpot['p50']:.2f}{spread(figures, 'tpot_ms', '.2f')}, TTFT {ttft['p50']:.1f} ms"
    speed = f"{figures['output_tokens_per_s']:,.0f}{spread(figures, 'output_tokens_per_s', ',.0f')} tok/s"
    return f"{speed}, TPOT {tpot['p50']:.2f}, TTFT {ttft['p50']:.0f} ms"


def spread(figures: dict[str, Any], key: str, form: str, percentile: str = "p50") -> str:
    """The range of a figure over the row's runs, in brackets; nothing when there was one."""
    if figures.get("runs", 1) == 1:
        return ""
    low, high = (figures[end][key] for end in ("low", "high"))
    if isinstance(low, dict):
        low, high = low[percentile], high[percentile]
    return f" ({low:{form}} to {high:{form}})"


def table(files: dict[str, Figures]) -> str:
    """Markdown; medians unless a percentile is named."""
    order = list(dict.fromkeys(row for figures in files.values() for row in figures))
    lines = ["| row | " + " | ".join(files) + " |", "|" + "---|" * (len(files) + 1)]
    lines += [f"| {row} | " + " | ".join(cell(row, f.get(row)) for f in files.values()) + " |" for row in order]
    return "\n".join(lines)


def plot(files: dict[str, Figures], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, rows in files.items():
        points = [
            r for r in rows.values() if (r.get("in_flight") or 0) > 1 and r.get("tpot_ms") and "1024/128" in r["row"]
        ]
        points.sort(key=lambda r: r["in_flight"])
        speed = [r["output_tokens_per_s"] for r in points]
        for axes, key, percentile in ((left, "ttft_ms", "p50"), (right, "itl_ms", "p99")):
            values = [r[key][percentile] for r in points]
            axes.plot(values, speed, marker="o", label=name)
            for r, x, y in zip(points, values, speed, strict=True):
                axes.annotate(str(r["in_flight"]), (x, y), textcoords="offset points", xytext=(6, -10))
    left.set_xlabel("time to first token, median (ms)")
    right.set_xlabel("gap between tokens, 99th percentile (ms)")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_ylabel("output tokens/s")
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle("1,024 tokens in, 128 out; the numbers are requests in flight")
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, help="also draw the plots into this file")
    args = parser.parse_args()
    files = {file.stem: read(file) for file in args.files}
    print(table(files))
    if args.png:
        plot(files, args.png)


if __name__ == "__main__":
    main()
