"""Measures tiles of the matrix products on the GPU, and says which are best for each shape.

    python -m perf.tune.linear [--rows 1 8 16 32 64] [--shape qwen3-4b qwen3-8b] [--json FILE] [--compile N]
    python -m perf.tune.linear --rows 512 1024 8192 --only gate_up

Each figure is a chain of layers with weights that are all different (so none is in the cache), inside a CUDA graph with
dependent launch: what a decode step pays. Every tile is checked against float64 before it is timed. At the end the best
tiles of a layer's four products run as a decoder chains them, norms included, and are exchanged one by one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.linear.dispatch import STREAM_ROWS, gated_persistent_tile, stream_tile, vector_tile, warp_specialized_tile
from kernels.linear.gated_persistent import GatedPersistentTile, gated_persistent_linear
from kernels.linear.skinny import Tile, VectorTile, counters, tile_linear, vector_linear
from kernels.linear.stream import StreamTile, stream_linear
from kernels.linear.warp_specialized import WarpSpecializedTile, warp_specialized_linear
from kernels.rms_norm.kernel import rms_norm
from kernels.workspace import Workspace
from perf.kernels import graph_seconds
from perf.provenance import provenance

Choice = Tile | VectorTile | StreamTile | WarpSpecializedTile | GatedPersistentTile | None
CHAIN_BYTES = 6e8
MAX_LAYERS = 16


@dataclass(frozen=True)
class Product:
    """One of a layer's products: name, outputs, inputs, and what stands around it."""

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

    @property
    def layers(self) -> int:
        return max(2, min(MAX_LAYERS, round(CHAIN_BYTES / self.bytes)))


# layers, hidden, heads times their width, qkv, intermediate, vocabulary
SHAPES = {
    "qwen3-4b": (36, 2560, 4096, 6144, 9728, 151936),
    "qwen3-8b": (36, 4096, 4096, 6144, 12288, 151936),
    "llama-3.1-8b": (32, 4096, 4096, 6144, 14336, 128256),
    # What each of two ranks holds of it.
    "llama-3.1-8b/2": (32, 4096, 2048, 3072, 7168, 64128),
}


def products(shape: str) -> list[Product]:
    _, hidden, attention, qkv, intermediate, vocabulary = SHAPES[shape]
    return [
        Product("qkv", qkv, hidden, norm=True),
        Product("o", hidden, attention, residual=True),
        Product("gate_up", intermediate, hidden, norm=True, activation="silu"),
        Product("down", hidden, intermediate, residual=True),
        Product("head", vocabulary, hidden),
    ]


def vector_tiles() -> list[VectorTile]:
    """outputs × inputs a program, warps, and the pipelines that were worth it (docs/experiments)."""
    tiles = []
    for outputs, inputs in (
        (1, 1024),
        (1, 2048),
        (2, 512),
        (2, 1024),
        (4, 256),
        (4, 512),
        (4, 1024),
        (8, 256),
        (8, 512),
    ):
        for warps in (2, 4, 8):
            if 8 <= outputs * inputs // (32 * warps) <= 32:
                tiles += [
                    VectorTile(outputs, inputs, warps, stages) for stages in (0, 3, 5) if not stages or inputs <= 512
                ]
    return tiles


def stream_tiles(rows: int, product: Product) -> list[StreamTile]:
    """Boxes, rings (a whole multiprocessor, or what leaves room for the next kernel), equal ranges or whole slices."""
    height = next(h for h in (8, 16, 32, 64) if rows <= h)
    wide = 2 if product.activation else 1
    boxes = [(64, 128, 4), (64, 256, 4), (64, 64, 4)] if height < 64 else [(64, 128, 4), (128, 64, 8), (128, 128, 8)]
    tiles = []
    for outputs, inputs, warps in boxes:
        blocks = -(-product.n // outputs)
        unit = (outputs * wide + height) * inputs * 2
        splits = {0, *range(132 // blocks, 264 // blocks + 1), -(-132 // blocks)} if blocks <= 264 else {0}
        for room in (112, 216):
            stages = (room * 1024 - outputs * height * 2) // unit
            if (2 if unit > 32768 else 3) <= stages <= 14:
                whole = {s for s in splits if s and (blocks * s <= 132 or room == 112)}
                tiles += [StreamTile(height, outputs, inputs, stages, 1, s, warps) for s in sorted({0, *whole})]
    return tiles


def gated_persistent_tiles(product: Product) -> list[GatedPersistentTile]:
    return [GatedPersistentTile(band=band) for band in (8, 16, 32)] if product.activation else []


def chosen(rows: int, product: Product) -> Choice:
    """What `linear` takes now."""
    if rows == 1:
        return vector_tile(product.n, product.k, product.norm, product.activation is not None)
    if rows > STREAM_ROWS:
        return gated_persistent_tile(rows, product.n, product.k, 132) if product.activation else None
    size = (rows, product.n, product.k, product.activation is not None, 132)
    return warp_specialized_tile(*size) or stream_tile(*size)


def choices(rows: int, product: Product) -> list[Choice]:
    tried: list[Choice] = [*vector_tiles()]
    if rows > 1:
        tried = [*stream_tiles(rows, product)] if rows <= STREAM_ROWS else [*gated_persistent_tiles(product)]
    return [None, *dict.fromkeys([chosen(rows, product), *tried])]


def call(product: Product, tile: Choice, workspace: Workspace) -> Callable[..., torch.Tensor]:
    """The product as a function of x, weight, norm weight and residual; a norm stands apart but for VectorTile."""

    def run(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor | None, r: torch.Tensor) -> torch.Tensor:
        residual = r if product.residual else None
        if isinstance(tile, VectorTile):
            return vector_linear(workspace, x, w, None, g, 1e-6, 0.0, residual, product.activation, tile)
        if g is not None:
            x, _ = rms_norm(workspace, x, g, 1e-6)
        if isinstance(tile, StreamTile):
            return stream_linear(workspace, x, w, None, residual, product.activation, tile, counters(workspace))
        if isinstance(tile, WarpSpecializedTile):
            return warp_specialized_linear(
                workspace, x, w, None, residual, product.activation, tile, counters(workspace)
            )
        if isinstance(tile, GatedPersistentTile):
            assert product.activation, "it is the activation that it is for"
            return gated_persistent_linear(workspace, x, w, product.activation, tile)
        if tile is not None:
            return tile_linear(workspace, x, w, None, None, 1e-6, 0.0, residual, product.activation, tile)
        if residual is not None:
            return torch.addmm(residual, x, w.t())
        y = torch.nn.functional.linear(x, w)
        return gated_activation(workspace, y, product.activation) if product.activation else y

    return run


def operands(product: Product, rows: int, layers: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    w = torch.empty(layers, product.weight_rows, product.k, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    g = torch.rand(product.k, device="cuda").bfloat16()
    r = torch.randn(rows, product.n, device="cuda").bfloat16()
    return x, w, g, r


def expected(product: Product, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    y = x.double() @ w.double().t()
    if product.activation:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y + r.double() if product.residual else y


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float(((y.double() - want).norm() / want.norm()).item())


def compile_share(share: list[tuple[Product, int, Choice]]) -> None:
    """Compiles by launching once, into Triton's disk cache. A tile that does not fit shows when it is measured."""
    made: dict[tuple[Product, int], tuple[torch.Tensor, ...]] = {}
    workspace = Workspace(torch.device("cuda"))
    for product, rows, tile in share:
        if (product, rows) not in made:
            made[product, rows] = operands(product, rows, 1)
        x, w, g, r = made[product, rows]
        try:
            call(product, tile, workspace)(x, w[0], g if product.norm else None, r)
        except Exception as problem:
            print("FAILED", product.name, rows, tile, type(problem).__name__, str(problem)[:120])
    torch.cuda.synchronize()


def repeat(
    run: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, g: torch.Tensor | None, r: torch.Tensor
) -> None:
    for weight in weights:
        run(x, weight, g, r)


Best = dict[tuple[int, str], list[tuple[float, Choice]]]


def write(path: str | None, records: list[dict[str, object]]) -> None:
    if path:
        with open(path, "a") as log:
            log.writelines(json.dumps({**record, **provenance()}) + "\n" for record in records)


def measure(shape: str, product: Product, all_rows: list[int], best: Best) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    workspace = Workspace(torch.device("cuda"))
    _, weights, g, _ = operands(product, 1, product.layers)
    for rows in all_rows:
        x, _, _, r = operands(product, rows, 0)
        bare = expected(product, x, weights[0], r)
        normed = expected(
            product, x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * g, weights[0], r
        )
        results: list[tuple[float, Choice]] = []
        for tile in choices(rows, product):
            run = call(product, tile, workspace)
            # only these have the norm inside; for the others it is a kernel of its own, timed in the chain
            norm, want = (g, normed) if product.norm and isinstance(tile, VectorTile) else (None, bare)
            try:
                off = max(error(run(x, weights[0], norm, r), want) for _ in range(2))
                if not off < 1e-2:
                    raise ArithmeticError(f"error {off:.3g}")
                seconds = graph_seconds(partial(repeat, run, x, weights, norm, r)) / product.layers
            except Exception as problem:  # a tile that does not fit is a result, not an end
                print("FAILED", product.name, rows, tile, type(problem).__name__, str(problem)[:100])
                if "CUDA" in str(problem) and "out of resource" not in str(problem):
                    raise
                continue
            results.append((seconds, tile))
            record: dict[str, object] = {"shape": shape, "product": product.name, "rows": rows, "us": seconds * 1e6}
            records.append(record | {"kind": type(tile).__name__, "tile": asdict(tile) if tile else None})
        results.sort(key=lambda pair: pair[0])
        best[rows, product.name] = results
        library = next((s for s, t in results if t is None), float("nan"))
        print(f"{shape} {product.name:8} rows {rows:3}: cuBLAS {library * 1e6:6.2f} us")
        for seconds, tile in results[:4]:
            print(f"    {seconds * 1e6:6.2f} us {product.bytes / seconds / 1e12:5.2f} TB/s  {tile}")
        sys.stdout.flush()
    return records


def layer_chain(shape: str, rows: int, best: Best) -> list[dict[str, object]]:
    """The four products as a decoder chains them: cuBLAS, best tiles, then those exchanged one by one."""
    _, hidden, attention, _, _, _ = SHAPES[shape]
    layers = 10
    parts = products(shape)[:4]
    weights = [
        torch.empty(layers, p.weight_rows, p.k, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02) for p in parts
    ]
    g = torch.rand(hidden, device="cuda").bfloat16()
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    workspace = Workspace(torch.device("cuda"))
    total = layers * sum(p.bytes for p in parts)
    records: list[dict[str, object]] = []

    def seconds(tiles: list[Choice]) -> float:
        runs = [call(p, t, workspace) for p, t in zip(parts, tiles, strict=True)]

        def chain() -> None:
            h = x
            for layer in range(layers):
                qkv = runs[0](h, weights[0][layer], g, h)
                h = runs[1](qkv[:, :attention], weights[1][layer], None, h)
                inner = runs[2](h, weights[2][layer], g, h)
                h = runs[3](inner, weights[3][layer], None, h)

        return graph_seconds(chain)

    def show(label: str, took: float, tiles: list[Choice]) -> None:
        rate = total / took / 1e12
        print(f"{shape} chain rows {rows:3} {label:9}: {took / layers * 1e6:6.2f} us a layer  {rate:5.2f} TB/s")
        record: dict[str, object] = {"shape": shape, "product": f"layer, {label}", "rows": rows}
        records.append(record | {"us": took / layers * 1e6, "tile": [repr(tile) for tile in tiles]})

    show("cuBLAS", seconds([None] * 4), [None] * 4)
    now_chosen = [chosen(rows, p) for p in parts]
    show("chosen", seconds(now_chosen), now_chosen)
    tiles: list[Choice] = [best[rows, p.name][0][1] for p in parts]
    now = seconds(tiles)
    show("best", now, tiles)
    for _ in range(2):
        for place, p in enumerate(parts):
            for _, tile in best[rows, p.name][:10]:
                other = [*tiles[:place], tile, *tiles[place + 1 :]]
                took = seconds(other)
                if took < now:
                    now, tiles = took, other
    show("exchanged", now, tiles)
    for p, tile in zip(parts, tiles, strict=True):
        print(f"    {p.name:8} {tile}")
    sys.stdout.flush()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", default=["qwen3-4b"])
    parser.add_argument("--only", nargs="*", default=[], help="names of products")
    parser.add_argument("--json", help="append every figure to this file")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile in N processes first")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new measurements after so long")
    args = parser.parse_args()
    began = time.monotonic()
    if args.compile:
        tasks = [
            (p, rows, t)
            for s in args.shape
            for rows in args.rows
            for p in products(s)
            if not args.only or p.name in args.only
            for t in choices(rows, p)
        ]
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(compile_share, [tasks[i :: args.compile] for i in range(args.compile)])
        print(f"{len(tasks)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    for shape in args.shape:
        best: Best = {}
        for product in products(shape):
            if time.monotonic() - began > args.seconds:
                print("out of time")
                break
            if not args.only or product.name in args.only:
                write(args.json, measure(shape, product, args.rows, best))
        for rows in args.rows:
            if all((rows, p.name) in best for p in products(shape)[:4]):
                write(args.json, layer_chain(shape, rows, best))
        print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
