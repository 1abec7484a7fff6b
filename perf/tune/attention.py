"""Measures tiles of paged attention on the GPU: python -m perf.tune.attention [--compile N] [--json FILE]

Every case of the registry with real shapes, every tile; prints the best three a case beside the tile in use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kernels.paged_attention.dispatch import LONGER, SINGLES, split_cut, tiles_cut
from kernels.paged_attention.tiles import Tile
from kernels.registry import Case, Op
from kernels.testing import bound, seeded
from perf.kernels import Ceilings, time_case
from perf.provenance import provenance

OP = Op("paged_attention")
BOUND = 20480


def tiles(case: Case) -> Iterator[Tile]:
    if "decode" in case.name:
        for keys, warps, stages in itertools.product((32, 64), (2, 4), (2, 3, 4)):
            for programs in (2, 4, 8):
                yield Tile(16, keys, warps, stages, programs)
    else:
        for rows, keys, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
            yield Tile(rows, keys, warps, stages)


@contextmanager
def holding(tile: Tile) -> Iterator[None]:
    """Within, the Triton kernel runs with this tile, and nothing runs in its place."""
    with ExitStack() as stack:
        for name in ("persistent", "persistent_fp8"):
            stack.enter_context(SINGLES.changed(name, declines=lambda problem: "left out while tiles are measured"))
        stack.enter_context(SINGLES.changed("split", config=lambda problem: split_cut(problem, tile)))
        stack.enter_context(LONGER.changed("tiles", config=lambda problem: tiles_cut(problem, tile)))
        yield


def _measure(index: int) -> list[tuple[float, Tile]]:
    device = torch.device("cuda")
    case = bounded(OP.cases()[index], BOUND)
    found = []
    for tile in tiles(case):
        with holding(tile):
            try:
                found.append((time_case(OP, case, device, Ceilings(1.0, 1.0), 10).median, tile))
            except Exception:  # more shared memory or registers than there are
                torch.cuda.empty_cache()
    return found


def bounded(case: Case, bound: int) -> Case:
    """The case as a captured graph runs it: the host's bound is the longest context that the engine allows."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        given = case.make(device, generator)
        return {**given, "batch": replace(given["batch"], max_context=bound)}

    return replace(case, make=make) if "decode" in case.name else case


def _compile(work: tuple[int, Tile]) -> None:
    device = torch.device("cuda")
    case = bounded(OP.cases()[work[0]], BOUND)
    with holding(work[1]):
        try:
            bound(OP)(**case.make(device, seeded(device)))
            torch.cuda.synchronize()
        except Exception:  # found again, and left out, when it is timed
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures tiles of paged attention.")
    parser.add_argument(
        "--cases", nargs="*", default=["decode 1 x 384", "decode 8 x 1100", "decode 64 x 1100", "decode 256 x 384"]
    )
    parser.add_argument("--compile", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [
        i for i, case in enumerate(OP.cases()) if not case.small and any(word in case.name for word in args.cases)
    ]
    work = [(i, replace(tile, programs=2, least=64)) for i in chosen for tile in tiles(OP.cases()[i])]
    work = list(dict.fromkeys(work))
    with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
        pool.map(_compile, work, chunksize=1)
    results = {}
    for i in chosen:
        case = bounded(OP.cases()[i], BOUND)
        now = time_case(OP, case, torch.device("cuda"), Ceilings(1.0, 1.0), 10).median
        best = sorted(_measure(i), key=lambda pair: pair[0])
        results[case.name] = {"now": now, "tiles": [{"microseconds": us, **asdict(tile)} for us, tile in best]}
        print(f"{case.name}: now {now:.2f} µs; " + "; ".join(f"{us:.2f} {tile}" for us, tile in best[:3]))
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
