"""Measures the cuts of the experts' products on the GPU, and says which are best for each shape and number of tokens.

    python -m perf.tune.moe [--shape qwen3-30b-a3b] [--tokens 1 8 64 8192] [--compile 12] [--json FILE]

Each figure is a chain of calls with their own random choice of experts over several layers' tables (so that little of
it is in the cache), inside a CUDA graph: what a layer of a step pays. Every variant is compared with the reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.moe_gemm import reference
from kernels.moe_gemm.dispatch import row_tiles
from kernels.moe_gemm.grouped import PAIRS, grouped_moe
from kernels.moe_gemm.order import ordered, placed
from kernels.moe_gemm.rows import RowTile, rows_moe_gemm
from kernels.moe_gemm.tiles import PairTile, tiles_moe
from kernels.moe_route.kernel import moe_route
from kernels.routing import Routing
from kernels.testing import workspace
from kernels.weight import Dense
from perf.kernels import graph_seconds
from perf.provenance import provenance

# hidden, inner channels, experts with shared ones, experts a token with shared ones, shared ones
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
    "deepseek-v2-lite": (2048, 1408, 66, 8, 2),
    "kimi-k2": (7168, 2048, 385, 9, 1),
}
Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """rows of pairs a tile, 0 for row by row; the cut of both products, None for the kernels of many pairs on Hopper;
    which of the two is being varied."""

    rows: int
    up: RowTile | PairTile | None
    down: RowTile | PairTile | None
    varied: str
    shared: int = 0

    def run(self, x: torch.Tensor, table: Tables, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        gate_up, down = table
        if self.up is None:
            tiles = placed(workspace(), experts, gate_up.shape[0], PAIRS)
            return grouped_moe(workspace(), x, gate_up, down, weights, experts, x, "silu", None, tiles)
        if isinstance(self.up, RowTile) and isinstance(self.down, RowTile):
            return rows_moe_gemm(
                workspace(), x, gate_up, down, weights, experts, x, "silu", None, self.shared, self.up, self.down
            )
        assert isinstance(self.up, PairTile)
        assert isinstance(self.down, PairTile)
        places = ordered(workspace(), experts, gate_up.shape[0], self.rows)
        return tiles_moe(workspace(), x, gate_up, down, weights, experts, x, "silu", None, places, self.up, self.down)


# A few tokens, the up product: outputs, inputs, warps, stages.
ROW_CUTS = (
    (4, 256, 4, 5),
    (4, 256, 4, 3),
    (4, 512, 4, 3),
    (4, 512, 4, 1),
    (4, 512, 8, 4),
    (8, 256, 4, 4),
    (8, 512, 8, 4),
    (2, 512, 2, 4),
    (2, 1024, 4, 4),
    (2, 1024, 4, 1),
    (2, 2048, 4, 1),
    (16, 256, 8, 3),
    (4, 1024, 8, 3),
    (4, 1024, 4, 2),
)
# Decode steps: outputs, inputs, stages.
STEP_CUTS = ((64, 64, 4), (64, 64, 6), (64, 128, 3), (64, 128, 4), (128, 64, 4), (128, 64, 3), (64, 256, 3))
# Prompts: outputs, inputs, stages, warps, bulk copies.
PROMPT_CUTS = (
    (128, 64, 4, 8, True),
    (128, 64, 3, 8, False),
    (128, 64, 4, 8, False),
    (128, 32, 5, 8, True),
    (128, 64, 3, 4, True),
    (64, 64, 4, 4, True),
    (64, 64, 5, 8, True),
)
PROMPT_DOWN_CUTS = (
    (128, 64, 4, 8, True),
    (128, 64, 3, 8, False),
    (128, 64, 3, 4, True),
    (128, 64, 4, 4, True),
    (128, 128, 2, 8, True),
    (256, 64, 3, 8, True),
    (256, 64, 4, 8, True),
    (256, 64, 3, 8, False),
    (64, 64, 4, 4, True),
)


def row_variants(inter: int, shared: int) -> Iterator[Variant]:
    up, down = row_tiles(inter)
    yield Variant(0, up, down, "base", shared)
    yield Variant(0, up, down, "base")
    for n, m, warps, stages in ROW_CUTS:
        yield Variant(0, RowTile(n, m, warps, stages), down, "up", shared)
    for n, m, warps in itertools.product((2, 4, 8), (256, 512, 1024), (2, 4, 8)):
        if 512 <= n * m // warps <= 2048:
            yield Variant(0, up, RowTile(n, m, warps), "down", shared)


def step_variants(rows: int) -> Iterator[Variant]:
    base = PairTile(64, 128, 4, 4, True, True)
    yield Variant(rows, base, base, "base")
    for (n, m, stages), warps, tma in itertools.product(STEP_CUTS, (4, 8), (True, False)):
        if warps == 8 and n == 64:
            continue
        tile = PairTile(n, m, stages, warps, True, tma)
        if 4 * n * m * stages <= 180_000:
            yield Variant(rows, tile, base, "up")
        yield Variant(rows, base, tile, "down")


def prompt_variants(rows: int) -> Iterator[Variant]:
    base = PairTile(128, 64, 3, 8, False, True)
    yield Variant(rows, base, base, "base")
    for n, m, stages, warps, tma in PROMPT_CUTS:
        yield Variant(rows, PairTile(n, m, stages, warps, False, tma), base, "up")
    for n, m, stages, warps, tma in PROMPT_DOWN_CUTS:
        yield Variant(rows, base, PairTile(n, m, stages, warps, False, tma), "down")


def variants(shape: str, tokens: int) -> Iterator[Variant]:
    if tokens <= 4:
        yield from row_variants(SHAPES[shape][1], SHAPES[shape][4])
    if 1 < tokens <= 256:
        for rows in (16,) if tokens < 64 else (16, 32):
            yield from step_variants(rows)
    if tokens > 256:
        yield Variant(PAIRS, None, None, "grouped")
        for rows in (64, 128):
            yield from prompt_variants(rows)


def inputs(shape: str, tokens: int, calls: int, seed: int = 0) -> tuple[list[torch.Tensor], list[Any], list[Any]]:
    hidden, _, experts, k, shared = SHAPES[shape]
    g = torch.Generator("cuda").manual_seed(seed)
    xs = [torch.randn(tokens, hidden, generator=g, device="cuda").bfloat16() for _ in range(calls)]
    routed, every = experts - shared, torch.arange(experts - shared, experts, device="cuda").expand(tokens, -1)
    drawn = [torch.rand(tokens, routed, generator=g, device="cuda").argsort(-1) for _ in range(calls)]
    chosen = [torch.cat((some[:, : k - shared], every), dim=1).int() for some in drawn]
    weights = [torch.rand(tokens, k, generator=g, device="cuda") for _ in range(calls)]
    return xs, chosen, weights


def tables(shape: str, layers: int) -> list[Tables]:
    hidden, inter, experts, *_ = SHAPES[shape]

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(0, size[-1] ** -0.5)

    return [(drawn(experts, 2 * inter, hidden), drawn(experts, hidden, inter)) for _ in range(layers)]


def _compile(work: tuple[str, int, list[Variant]]) -> None:
    shape, tokens, made = work
    (x,), (experts,), (weights,) = inputs(shape, tokens, 1)
    hidden, inter, count, *_ = SHAPES[shape]
    table = (
        torch.zeros(count, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16),
        torch.zeros(count, hidden, inter, device="cuda", dtype=torch.bfloat16),
    )
    for variant in made:
        try:
            variant.run(x, table, weights, experts)
        except Exception as problem:
            print("not compiled:", variant, str(problem).splitlines()[0][:150], flush=True)
    torch.cuda.synchronize()


def measure(shape: str, tokens: int, layers: int, made: list[Variant]) -> list[dict[str, Any]]:
    hidden, inter, _, k, _ = SHAPES[shape]
    calls = 16 if tokens <= 64 else 4
    held = tables(shape, layers)
    xs, chosen, weights = inputs(shape, tokens, calls)
    gate_up, down = held[0]
    want = reference.moe_gemm(xs[0], Dense(gate_up), Dense(down), weights[0], chosen[0], xs[0]).float()
    moved = statistics.mean(len(c.unique()) for c in chosen) * 6 * hidden * inter
    work = 6 * tokens * k * hidden * inter
    found = []
    for variant in made:

        def chain(variant: Variant = variant) -> None:
            for i in range(calls):
                variant.run(xs[i], held[i % layers], weights[i], chosen[i])

        try:
            got = variant.run(xs[0], held[0], weights[0], chosen[0]).float()
            seconds = graph_seconds(chain) / calls
        except Exception as problem:
            print("failed:", variant, str(problem).splitlines()[0][:150])
            continue
        figures = {
            "shape": shape,
            "tokens": tokens,
            "us": round(seconds * 1e6, 2),
            "gb_per_s": round(moved / seconds * 1e-9),
            "tflop_per_s": round(work / seconds * 1e-12, 1),
            "error": round(float((got - want).norm() / want.norm()), 5),
        }
        found.append(figures | asdict(variant))
    return found


def route_time(shape: str, tokens: int) -> float:
    """Seconds of the choice of experts with the norm before it."""
    hidden, _, count, k, shared = SHAPES[shape]
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    router = torch.randn(16, count - shared, hidden, device="cuda") * hidden**-0.5
    norm = torch.ones(hidden, device="cuda").bfloat16()

    def chain() -> None:
        for i in range(16):
            moe_route(workspace(), x, router[i], Routing(k - shared, num_shared=shared), norm_weight=norm)

    return graph_seconds(chain) / 16


def shown(figures: dict[str, Any]) -> str:
    tile = figures["up"] if figures["varied"] != "down" else figures["down"]
    cut = " ".join(str(int(value)) for value in (tile or {}).values())
    speed = f"{figures['us']:8.1f} us {figures['gb_per_s']:5} GB/s {figures['tflop_per_s']:6} TFLOP/s"
    return f"  {speed} error {figures['error']:.4f} {figures['varied']:4} rows {figures['rows']} {cut}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["qwen3-30b-a3b", "deepseek-v2-lite"], choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 8, 64, 1024, 8192])
    parser.add_argument("--layers", type=int, default=3, help="tables of experts to go through")
    parser.add_argument("--compile", type=int, default=12)
    parser.add_argument("--shown", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    work = [(shape, tokens, list(variants(shape, tokens))) for shape in args.shape for tokens in args.tokens]
    parts = [(s, t, made[i::4]) for s, t, made in work for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(max(1, args.compile)) as pool:
        pool.map(_compile, parts if args.compile else [], chunksize=1)
    print(f"compiled in {time.monotonic() - began:.0f} s, triton {triton.__version__}", flush=True)
    every: list[dict[str, Any]] = []
    for shape, tokens, made in work:
        print(f"{shape}, {tokens} tokens: route {route_time(shape, tokens) * 1e6:.1f} us")
        found = measure(shape, tokens, args.layers, made)
        every += found
        for varied in ("grouped", "base", "up", "down"):
            best = sorted((f for f in found if f["varied"] == varied), key=lambda f: f["us"])[: args.shown]
            for figures in best:
                print(shown(figures))
        torch.cuda.empty_cache()
        print(flush=True, end="")
    if args.json:
        args.json.write_text("\n".join(json.dumps({**f, **provenance()}) for f in every) + "\n")


if __name__ == "__main__":
    main()
