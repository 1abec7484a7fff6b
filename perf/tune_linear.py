"""Measures tiles of the few-row matrix products on the GPU, and says which are best for each shape.

    python -m perf.tune_linear [--rows 1 8 16 32 64] [--shape qwen3-4b] [--json FILE]

Each figure is a chain of as many layers as the model has, weights all different (so none is in the cache), inside a
CUDA graph: what a decode step pays. Kernels are compiled first, in parallel processes that share Triton's disk cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kernels.linear.skinny import Tile, VectorTile, tile_linear, vector_linear


@dataclass(frozen=True)
class Product:
    """One of a layer's four products: name, outputs, inputs, and what is fused with it."""

    name: str
    n: int
    k: int
    norm: bool = False
    activation: str | None = None
    residual: bool = False

    @property
    def weight_rows(self) -> int:
        return self.n * (2 if self.activation else 1)

    @property
    def bytes(self) -> int:
        return self.weight_rows * self.k * 2


SHAPES = {
    "qwen3-4b": (36, 2560, 4096, 6144, 9728),
    "qwen3-8b": (36, 4096, 4096, 6144, 12288),
}


def products(shape: str) -> list[Product]:
    _, hidden, attention, qkv, intermediate = SHAPES[shape]
    return [
        Product("qkv", qkv, hidden, norm=True),
        Product("o", hidden, attention, residual=True),
        Product("gate_up", intermediate, hidden, norm=True, activation="silu"),
        Product("down", hidden, intermediate, residual=True),
        Product("qkv_bare", qkv, hidden),
        Product("gate_up_bare", intermediate, hidden, activation="silu"),
    ]


def vector_tiles() -> list[VectorTile]:
    tiles = []
    for outputs in (1, 2, 4, 8):
        for inputs in (256, 512, 1024, 2048):
            for warps in (2, 4, 8):
                if not 8 <= outputs * inputs // (32 * warps) <= 32:
                    continue
                tiles += [VectorTile(outputs, inputs, warps, 0, prefetch) for prefetch in (0, 512)]
                if inputs <= 1024:
                    tiles += [VectorTile(outputs, inputs, warps, s, p) for s in (3, 5) for p in (0, 512)]
    return tiles


def row_tiles(rows: int, product: Product) -> list[Tile]:
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = []
    splits = (1, 2, 4) if product.residual else (1,)
    for outputs, inputs in ((16, 128), (16, 256), (32, 64), (32, 128), (32, 256), (64, 64), (64, 128), (128, 64)):
        for split in splits:
            for stages in (3, 4, 6):
                for swap in (False, True):
                    if swap and outputs < 64:
                        continue
                    wide = 2 if product.activation else 1
                    shared = (stages - 1) * inputs * (outputs * wide + height) * 2
                    programs = product.n // outputs * split
                    resident = min(programs / 132, 220_000 // shared)
                    if shared > 200_000 or resident * shared < 50_000 or programs < 80:
                        continue
                    for warps in (4, 8):
                        if warps == 8 and (outputs * inputs * wide < 8192 or swap):
                            continue
                        tiles += [Tile(height, outputs, inputs, split, 1, stages, warps, swap, p) for p in (0, 256)]
    return tiles


def call(product: Product, tile: Tile | VectorTile, pdl: bool = True) -> Callable[..., torch.Tensor]:
    """The product as a function of x, weight, norm weight and residual."""

    def run(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        norm = g if product.norm else None
        residual = r if product.residual else None
        if isinstance(tile, VectorTile):
            return vector_linear(x, w, None, norm, 1e-6, 0.0, residual, product.activation, tile, pdl)
        return tile_linear(x, w, None, norm, 1e-6, 0.0, residual, product.activation, tile, pdl)

    return run


def library(product: Product) -> Callable[..., torch.Tensor]:
    """The bare product by cuBLAS, nothing fused but the residual."""

    def run(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        if product.residual:
            return torch.addmm(r, x, w.t())
        return torch.nn.functional.linear(x, w)[:, : product.n]

    return run


def operands(product: Product, rows: int, layers: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    w = torch.empty(layers, product.weight_rows, product.k, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    g = torch.rand(product.k, device="cuda").bfloat16()
    r = torch.randn(rows, product.n, device="cuda").bfloat16()
    return x, w, g, r


def graph_time(work: Callable[[], None], repeats: int = 9) -> float:
    """Median seconds of a replay of `work` captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def compile_share(share: list[tuple[Product, int, Tile | VectorTile]]) -> list[str]:
    """Compiles by launching once. Returns what failed, as sentences."""
    failed = []
    made: dict[tuple[Product, int], tuple[torch.Tensor, ...]] = {}
    for product, rows, tile in share:
        if (product, rows) not in made:
            made[product, rows] = operands(product, rows, 1)
        x, w, g, r = made[product, rows]
        try:
            y = call(product, tile)(x, w[0], g, r)
            h = x.double()
            if product.norm:
                h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * g.double()
            ref = h @ w[0].double().t()
            if product.activation:
                gate, up = ref.chunk(2, -1)
                ref = torch.nn.functional.silu(gate) * up
            if product.residual:
                ref = ref + r.double()
            error = ((y.double() - ref).norm() / ref.norm()).item()
            if not error < 1e-2:
                failed.append(f"{product.name} rows {rows} {tile}: error {error:.3g}")
        except Exception as problem:  # a tile that does not fit is a result, not an end
            failed.append(f"{product.name} rows {rows} {tile}: {type(problem).__name__} {str(problem)[:120]}")
    torch.cuda.synchronize()
    return failed


def repeat(
    run: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, g: torch.Tensor, r: torch.Tensor
) -> None:
    for weight in weights:
        run(x, weight, g, r)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--json", help="append every figure to this file")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new measurements after so long")
    args = parser.parse_args()
    began = time.monotonic()
    layers = SHAPES[args.shape][0]
    tasks: list[tuple[Product, int, Tile | VectorTile]] = []
    for rows in args.rows:
        for product in products(args.shape):
            tasks += [(product, rows, t) for t in (vector_tiles() if rows == 1 else row_tiles(rows, product))]
    workers = max(1, (os.cpu_count() or 2) - 2)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        shares = pool.map(compile_share, [tasks[i::workers] for i in range(workers)])
    failed = {line for share in shares for line in share}
    for line in sorted(failed)[:20]:
        print("FAILED", line)
    print(f"{len(tasks)} kernels compiled and checked, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    sys.stdout.flush()

    records: list[dict[str, object]] = []
    best: dict[tuple[int, str], list[tuple[float, Tile | VectorTile | None]]] = {}
    for product in products(args.shape):
        _, weights, g, _ = operands(product, 1, layers)
        for rows in args.rows:
            if time.monotonic() - began > args.seconds:
                print("out of time")
                break
            x, _, _, r = operands(product, rows, 0)
            results: list[tuple[float, Tile | VectorTile | None]] = []
            choices: list[Tile | VectorTile | None] = [None]
            choices += [t for p, m, t in tasks if p == product and m == rows]
            for tile in choices:
                run = library(product) if tile is None else call(product, tile)
                try:
                    seconds = graph_time(partial(repeat, run, x, weights, g, r)) / layers
                except Exception as problem:
                    print("FAILED", product.name, rows, tile, type(problem).__name__, str(problem)[:100])
                    continue
                results.append((seconds, tile))
                record = {"shape": args.shape, "product": product.name, "rows": rows, "us": seconds * 1e6}
                records.append(record | {"tile": asdict(tile) if tile else None})
            results.sort(key=lambda pair: pair[0])
            best[rows, product.name] = results
            base = next(s for s, t in results if t is None)
            print(f"{product.name:8} rows {rows:3}: cuBLAS {base * 1e6:6.2f} us")
            for seconds, tile in results[:4]:
                print(f"    {seconds * 1e6:6.2f} us {product.bytes / seconds / 1e12:5.2f} TB/s  {tile}")
            sys.stdout.flush()
    if args.json:
        with open(args.json, "a") as log:
            log.writelines(json.dumps(record) + "\n" for record in records)
    for rows in args.rows:
        if all((rows, p.name) in best for p in products(args.shape)):
            layer_chain(args.shape, rows, best)


Best = dict[tuple[int, str], list[tuple[float, Tile | VectorTile | None]]]


def layer_chain(shape: str, rows: int, best: Best) -> None:
    """The four products as a decoder chains them: best tiles, then exchanged one by one."""
    layers, hidden, attention, _, _ = SHAPES[shape]
    parts = products(shape)[:4]
    weights = [
        torch.empty(layers, p.weight_rows, p.k, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02) for p in parts
    ]
    g = torch.rand(hidden, device="cuda").bfloat16()
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    total = layers * sum(p.bytes for p in parts)

    def seconds(tiles: list[Tile | VectorTile | None], pdl: bool) -> float:
        runs = [call(p, t, pdl) if t is not None else library(p) for p, t in zip(parts, tiles, strict=True)]

        def chain() -> None:
            h = x
            for layer in range(layers):
                qkv = runs[0](h, weights[0][layer], g, h)
                h = runs[1](qkv[:, :attention], weights[1][layer], g, h)
                inner = runs[2](h, weights[2][layer], g, h)
                h = runs[3](inner, weights[3][layer], g, h)

        return graph_time(chain)

    def show(label: str, took: float) -> None:
        print(f"chain rows {rows:3} {label:9}: {took * 1e3:6.3f} ms  {total / took / 1e12:5.2f} TB/s")

    tiles: list[Tile | VectorTile | None] = [best[rows, p.name][0][1] for p in parts]
    show("no PDL", seconds(tiles, False))
    now = seconds(tiles, True)
    show("PDL", now)
    for _ in range(2):
        for place, p in enumerate(parts):
            for _, tile in best[rows, p.name][:10]:
                other = [*tiles[:place], tile, *tiles[place + 1 :]]
                took = seconds(other, True)
                if took < now:
                    now, tiles = took, other
    show("exchanged", now)
    for p, tile in zip(parts, tiles, strict=True):
        print(f"    {p.name:8} {tile}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
