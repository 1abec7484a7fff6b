"""The table of docs/families.md: every family at full size through the real server, dummy weights.

    python -m perf.families CONFIGS --json FILE [--models qwen3-30b-a3b …]      measures, then writes the table
    python -m perf.families CONFIGS --json FILE --models                        measures none: floors that FILE lacks
    python -m perf.families --json perf/results/h200/families.jsonl             writes the table from results

CONFIGS is a folder of published configs, one folder a model. A model too large for one GPU keeps its first layers.
Floors are the bytes that one token needs over the bandwidth that a copy reaches on the GPU: weights (of experts the
chosen ones), the cache of a context half-way through the first row, and recurrent state once read and once written.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from perf import shapes

DOCS = Path(__file__).parent.parent / "docs" / "families.md"
MARKS = ("<!-- served: python -m perf.families -->", "<!-- end of served -->")
BYTES_PER_S = 4.26e12
CONTEXT = 256
ROWS = ("1x128/256", "1x1024/1", "64x1024/128")
WIDE = "256x1024/128"
# Models and the layers kept of those too large.
MODELS: dict[str, int | None] = {
    "llama-3.1-8b": None,
    "mistral-7b-v0.3": None,
    "gemma-3-4b": None,
    "qwen3.5-4b-text": None,
    "qwen3-30b-a3b": None,
    "deepseek-v2-lite": None,
    "kimi-k2-instruct-as-deepseek_v3": 4,
    "deepseek-v4-flash-bf16": 8,
}
# vLLM 0.26.0 on such a machine, the same client: TPOT of one stream in ms, tokens/s of 64 streams and of 256.
# DeepSeek-V2-Lite with experts drawn evenly (vllm-deepseek-v2-lite.jsonl), which was not measured with 256 streams: by
# its dummy weights all tokens choose the same six.
PEER = {
    "llama-3.1-8b": "4.90 ms, 3,271, 3,863",
    "qwen3-30b-a3b": "4.11 ms, 1,979, 4,574",
    "deepseek-v2-lite": "3.06 ms, 3,532, -",
}
# Graphs are made in the first 6 to 14 seconds, at the power limit; a GPU still warm from it decodes 0.8 % slower.
SETTLE_S = 24.0


def floor_ms(model: Path) -> float:
    """Milliseconds to move what one token needs: of experts the chosen and shared ones, no embedding."""
    import torch

    from engine.cache.spec import Recurrent, group_layers, window_of
    from engine.layers.build_context import BuildContext
    from engine.layers.moe import Moe
    from engine.models.decoder import Decoder
    from engine.quant import plan as quant
    from kernels.select import select
    from kernels.workspace import Workspace
    from perf.checkpoints import ruled

    config, _, method, rules = ruled(model)
    dtype = getattr(torch, config.dtype or "bfloat16")
    cpu = torch.device("cpu")
    decoder = Decoder(BuildContext(select(Workspace(cpu)), config, dtype, cpu, 128, router_dtype=dtype))
    quant.plan(decoder.weights, rules, None, method)
    total = float(decoder.num_bytes)
    for layer in decoder.layers:
        if isinstance(layer.ffn, Moe):
            total -= layer.ffn.idle * (layer.ffn.gate_up.nbytes + layer.ffn.down.nbytes)
    if not config.tied:
        total -= decoder.embed.weight.nbytes
    for group in group_layers(decoder.specs):
        if isinstance(group.spec, Recurrent):
            total += 2 * group.spec.bytes_per_request * len(group.layers)
        else:
            read = min(window_of(group.spec) or CONTEXT, CONTEXT)
            total += group.spec.bytes_per_token * read * len(group.layers)
    return total / BYTES_PER_S * 1e3


def measure(configs: Path, names: list[str], results: Path, settle_s: float, measured: list[str]) -> None:
    """Appends the rows of each model to `results`; a model that fails is named and left out."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            layers = MODELS[name]
            source = name if name in shapes.SHAPES else str(configs / name)
            model = shapes.write(Path(scratch), source, layers)
            command = [sys.executable, "-m", "perf.suite", "nereid", scratch, model.name, "--json", str(results)]
            command += ["--settle", str(settle_s), "--set", "load_format=dummy", "--set", "max_model_len=8192"]
            with subprocess.Popen([*command, "--rows", *measured]) as suite:
                try:
                    failed = suite.wait()
                except SystemExit:
                    suite.terminate()  # it ends its server
                    raise
            if failed:
                print(f"{name} failed", flush=True)


def add_floors(configs: Path, results: Path) -> None:
    """Appends the floor of each model in `results` that has none there."""
    for name, rows in read(results).items():
        if name not in MODELS or "floor" in rows:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            source = name if name in shapes.SHAPES else str(configs / name)
            floor = floor_ms(shapes.write(Path(scratch), source, MODELS[name]))
        with results.open("a") as file:
            figures = {"row": "floor", "model": name, "layers": MODELS[name], "floor_ms": round(floor, 3)}
            file.write(json.dumps(figures) + "\n")


def read(results: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by model and row; of a row that was measured several times the last counts, and none
    with requests that failed."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in results.read_text().splitlines():
        figures = json.loads(line)
        if not figures.get("failed"):
            found.setdefault(figures["model"], {})[figures["row"]] = figures
    return found


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        "| model | floor of a token | 1 stream: TPOT | of the floor | TTFT 128 in, 1,024 in "
        "| 64 streams 1,024/128: tok/s | ITL, TTFT | 256 streams: tok/s | vLLM 0.26: TPOT, tok/s of 64 and 256 "
        "| start to ready | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        one, prompt, many, wide = (rows.get(row) for row in (*ROWS, WIDE))
        floor, layers = rows.get("floor", {}).get("floor_ms"), rows.get("floor", {}).get("layers")
        tpot = one["tpot_ms"]["p50"] if one else None
        firsts = [f"{row['ttft_ms']['p50']:.1f}" if row else "-" for row in (one, prompt)]
        cells = [
            name if layers is None else f"{name}, {layers} layers",
            f"{floor:.2f} ms" if floor else "",
            f"{tpot:.2f} ms" if tpot else "-",
            f"{floor / tpot:.0%}" if floor and tpot else "",
            f"{firsts[0]}, {firsts[1]} ms",
            f"{many['output_tokens_per_s']:,.0f}" if many else "-",
            f"{many['itl_ms']['p50']:.1f}, {many['ttft_ms']['p50']:.0f} ms" if many else "-",
            f"{wide['output_tokens_per_s']:,.0f}" if wide else "",
            PEER.get(name, ""),
            f"{rows['start']['ready_s']:.1f} s" if "start" in rows else "-",
            ", ".join(dict.fromkeys(row["commit"][:7] for row in (one, prompt, many, wide) if row)) or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Each figure is the median of one run."])


def written(text: str, made: str) -> str:
    """`text` with `made` between the marks."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="?", help="folder of published configs; without it nothing is run")
    parser.add_argument("--json", type=Path, required=True, help="results; measured rows are appended")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=(*ROWS, WIDE))
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before the first row")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.configs is not None:
        measure(args.configs, args.models, args.json, args.settle, args.rows)
        add_floors(args.configs, args.json)
    made = table(read(args.json))
    DOCS.write_text(written(DOCS.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
