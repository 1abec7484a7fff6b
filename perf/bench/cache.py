"""What a cache of 8-bit floats saves: the time of a decode step beside that with a cache of the model's dtype.

    python -m perf.bench.cache CHECKPOINT [--rows 64] [--context 16384] [--json cache.jsonl] --set load_format=dummy

Both are measured one after the other in this process, as `perf.simulate.step_costs` does it. A cache of the model's
dtype must hold all rows: 64 of 16,384 tokens are 4.3 GB a layer of Qwen3-8B, so give a folder of fewer layers
(`perf.shapes FOLDER qwen3-8b --layers 24`) where a GPU cannot hold all.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch

from engine.cache.spec import Recurrent
from perf.bench.engine import config_from
from perf.simulate.step_costs import Cost, measure, publish

KINDS = ("16bit", "fp8")


def step(model: str, settings: list[str], rows: int, context: int) -> tuple[Cost, float]:
    """The cost of a step of `rows` decoding rows behind `context` tokens, and bytes of a token in the cache.

    Raises ValueError when the pool holds fewer tokens than all rows have, so that they would share blocks.
    """
    from engine.parallel.ranks import open_runner

    budget = [f"scheduler.token_budget={max(8192, context)}", f"scheduler.max_rows={rows}"]
    config = config_from(model, [*budget, *settings])
    runner = open_runner(config)[0]
    try:
        pool = runner.info.pool
        kept = [group for group in pool.groups if not isinstance(group.spec, Recurrent)]
        held = min(count for count, group in zip(pool.num_blocks, pool.groups, strict=True) if group in kept)
        if (held - 1) * pool.block_size < rows * context:
            raise ValueError(
                f"the pool holds {(held - 1) * pool.block_size} tokens and {rows} rows of {context} need "
                f"{rows * context}: take fewer layers, rows or tokens"
            )
        limits = (config.scheduler.max_rows, config.scheduler.token_budget)
        (cost,) = measure(runner, *limits, context, 1, [rows], [0])
        return cost, sum(group.block_bytes(pool.block_size) for group in kept) / pool.block_size
    finally:
        runner.close()
        del runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--json", type=Path, help="append both costs to this file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    args = parser.parse_args()
    times = []
    for kind in KINDS:
        settings = [*args.set, f"cache.dtype={kind}"]
        cost, size = step(args.model, settings, args.rows, args.context)
        times.append(cost.step_ms)
        print(f"{kind}: {cost.step_ms:.3f} ms a step, {size:.0f} bytes a token")
        if args.json is not None:
            publish([cost], args.model, settings, args.json)
    print(f"{KINDS[1]} takes {times[1] / times[0]:.3f} of the time")


if __name__ == "__main__":
    main()
