"""Whether anything is compiled once the engine is ready: it starts with an empty cache of Triton's and serves steps of
every kind. A kernel that comes late stalls every stream for a second.

    python -m perf.check.late_compiles CHECKPOINT [--set load_format=dummy]

Exits with 1 when something was; the engine's log names it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence

# One stream, few, many, and prompts that arrive beside decoding rows; contexts on both sides of every threshold.
LOADS = (
    "c=1:n=4:in=3-900:out=24",
    "c=7:n=21:in=1-60:out=40",
    "q=40:n=120:in=16-3000:out=8-80",
    "c=64:n=96:in=900-1100:out=32",
    "c=256:n=300:in=8-300:out=16",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    parser.add_argument("--load", nargs="+", default=LOADS, metavar="SPEC")
    parser.add_argument("--low", type=int, default=1000)
    parser.add_argument("--high", type=int, default=100_000)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        return run(given)


def run(given: argparse.Namespace) -> int:
    from engine.api import Engine
    from perf.bench.engine import config_from, measure
    from perf.workload import parse

    began = time.perf_counter()
    engine = Engine.from_config(config_from(given.model, given.set)).start()
    print(f"ready after {time.perf_counter() - began:.1f} s with an empty cache", flush=True)
    try:
        for seed, text in enumerate(given.load):
            figures, _ = measure(engine, parse(text, seed), given.low, given.high)
            late = engine.stats().late_compiles
            print(f"{text:<40} {figures['output_tokens_per_s']:9.1f} tok/s, {late} compiled late so far", flush=True)
    finally:
        engine.close()
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
