"""Times whole decoder layers of a decode step in a chain, and exchanges their tiles one by one.

    python -m perf.bench.layer ROWSxCONTEXT … [--shape llama-3.1-8b] [--slots down single] [--compile 15] [--json FILE]

A figure is microseconds a layer: qkv product, rope, KV write and attention, out product, gate and up, down, with their
norms, over the weights and caches of some layers in turn, in a CUDA graph with the bound on contexts that an engine
has. A slot is one of the products (tiles of `perf.tune.linear`), `paged` or `single` (tiles of attention by two kernels
and by one), or `fuses` (which of these). Each choice is timed beside what the others are now, checked against it, and
has to give the same bits in a second run; the best of a slot stays for those after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels.dispatch import Dispatch
from kernels.linear import dense
from kernels.linear import dispatch as products_of
from kernels.linear.dense import linear
from kernels.linear.stream import StreamTile
from kernels.linear.warp_specialized import WarpSpecializedTile
from kernels.paged_attention import dispatch as paged
from kernels.paged_attention.tiles import Tile
from kernels.rope_attention import dispatch as fused
from kernels.rope_attention.cases import case
from kernels.rope_attention.kernel import rope_attention
from kernels.testing import seeded, workspace
from kernels.weight import Dense
from perf.bench.chain import BOUND
from perf.kernels import graph_seconds
from perf.provenance import provenance
from perf.tune.linear import SHAPES, Product, choices, products

HEADS, GROUPS, DIM = 32, 8, 128
LAYERS, CALLS, CHECKED = 6, 18, 2
# Relative difference of two layers' results that rounding at other places makes.
ROUNDING = 1e-2

Choices = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A step of `rows` sequences of one token, each with `context` tokens."""

    shape: str
    rows: int
    context: int

    @property
    def label(self) -> str:
        return f"{self.shape} {self.rows}x{self.context}"

    @property
    def products(self) -> list[Product]:
        return products(self.shape)[:4]

    def tried(self, slot: str) -> list[Any]:
        """What a slot may hold."""
        if slot == "fuses":
            return [False, True]
        if slot == "paged":
            return [
                Tile(16, keys, w, s, p) for keys in (32, 64) for w, s in ((2, 2), (2, 4), (4, 4)) for p in (2, 4, 8)
            ]
        if slot == "single":
            cuts = ((128, 1, 4, 3, 128), (128, 2, 4, 3, 256), (128, 2, 8, 3, 256), (256, 1, 8, 2, 256))
            return [fused.FusedDecodeTile(8, keys, w, s, 1, least, ahead=ahead) for keys, ahead, w, s, least in cuts]
        product = next(p for p in self.products if p.name == slot)
        return [tile for tile in choices(self.rows, product) if tile is not None]


class Chain:
    """Layers of a shape with caches that hold the point's context."""

    def __init__(self, point: Point, layers: int = LAYERS) -> None:
        self._layers = layers
        device = torch.device("cuda")
        weights = [
            {
                p.name: torch.empty(p.weight_rows, p.k, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
                for p in point.products
            }
            for _ in range(layers)
        ]
        made = case(
            point.label, torch.bfloat16, [(1, point.context)] * point.rows, HEADS, GROUPS, DIM,
            qk_norm=point.shape.startswith("qwen3"), strided=True, bound=BOUND,
        )  # fmt: skip
        caches = [made.make(device, seeded(device, i)) for i in range(layers if made.bytes < 4e8 else 2)]
        self._parts = [(weights[i], caches[i % len(caches)]) for i in range(layers)]
        _, hidden, *_ = SHAPES[point.shape]
        self._norm = torch.rand(hidden, device=device).bfloat16() + 0.5
        self._x = torch.randn(point.rows, hidden, device=device).bfloat16()

    def run(self, calls: int) -> torch.Tensor:
        h = self._x
        for i in range(calls):
            weights, cache = self._parts[i % self._layers]
            qkv = linear(workspace(), h, Dense(weights["qkv"]), norm_weight=self._norm)
            attended = rope_attention(workspace(), **{**cache, "qkv": qkv}).flatten(1)
            h = linear(workspace(), attended, Dense(weights["o"]), residual=h)
            inner = linear(workspace(), h, Dense(weights["gate_up"]), norm_weight=self._norm, activation="silu")
            h = linear(workspace(), inner, Dense(weights["down"]), residual=h)
        return h

    def microseconds(self) -> float:
        return graph_seconds(lambda: self.run(CALLS), 5) / CALLS * 1e6


@contextlib.contextmanager
def holding(point: Point, held: Choices) -> Iterator[None]:
    """Launchers choose what `held` says, and as ever where it says nothing."""
    vector, stream, warp_specialized = (
        products_of.vector_tile,
        products_of.stream_tile,
        products_of.warp_specialized_tile,
    )
    parts = point.products

    def vector_tile(n: int, k: int, norm: bool, activation: bool) -> Any:
        slot = next(p.name for p in parts if (p.k, p.norm, p.activation is not None) == (k, norm, activation))
        return held.get(slot) or vector(n, k, norm, activation)

    def slot_of(n: int, k: int, activation: bool) -> str:
        return next(p.name for p in parts if (p.n, p.k, p.activation is not None) == (n, k, activation))

    def stream_tile(rows: int, n: int, k: int, activation: bool, multiprocessors: int) -> Any:
        tile = held.get(slot_of(n, k, activation))
        return tile if isinstance(tile, StreamTile) else stream(rows, n, k, activation, multiprocessors)

    def warp_specialized_tile(rows: int, n: int, k: int, activation: bool, multiprocessors: int) -> Any:
        tile = held.get(slot_of(n, k, activation), warp_specialized(rows, n, k, activation, multiprocessors))
        return tile if isinstance(tile, WarpSpecializedTile) else None

    with contextlib.ExitStack() as stack:
        # Choices are remembered by shape: these have a memory of their own.
        stack.enter_context(mock.patch.object(dense, "DISPATCH", Dispatch(products_of.DISPATCH.variants)))
        stack.enter_context(mock.patch.object(products_of, "vector_tile", vector_tile))
        stack.enter_context(mock.patch.object(products_of, "stream_tile", stream_tile))
        stack.enter_context(mock.patch.object(products_of, "warp_specialized_tile", warp_specialized_tile))
        if "paged" in held:
            stack.enter_context(paged.SINGLES.changed("persistent", declines=lambda problem: "a tile is held"))
            stack.enter_context(paged.SINGLES.changed("split", config=partial(paged.split_cut, tile=held["paged"])))
        if "single" in held:
            tile = held["single"]
            stack.enter_context(fused.DISPATCH.changed("fused", config=partial(fused.fused_cut, tile=tile)))
        if "fuses" in held:
            why = None if held["fuses"] else "two ops are held"
            stack.enter_context(fused.DISPATCH.changed("fused", declines=lambda problem: why))
        yield


def compile_share(share: list[tuple[Point, Choices]]) -> None:
    """Compiles by running once, into Triton's disk cache. What does not fit shows when it is timed."""
    for point, held in share:
        with contextlib.suppress(Exception), holding(point, held):
            Chain(Point(point.shape, point.rows, 64), layers=1).run(1)
    torch.cuda.synchronize()


def measure(point: Point, slots: list[str]) -> list[dict[str, Any]]:
    chain, held = Chain(point), Choices()
    records: list[dict[str, Any]] = []

    def record(slot: str, choice: Any, took: float, off: float = 0.0) -> None:
        records.append({"point": point.label, "slot": slot, "choice": repr(choice), "us": round(took, 2), "off": off})
        print(f"{point.label} {slot:8} {took:8.2f} us a layer  {choice}", flush=True)

    want, best = chain.run(CHECKED), chain.microseconds()
    record("as it is", None, best)
    for slot in slots:
        stays = held
        for choice in point.tried(slot):
            trial = {**held, slot: choice}
            try:
                with holding(point, trial):
                    got, again, took = chain.run(CHECKED), chain.run(CHECKED), chain.microseconds()
            except Exception as problem:  # a tile that does not fit is a result, not an end
                print("FAILED", slot, choice, type(problem).__name__, str(problem)[:100])
                continue
            off = float((got.double() - want.double()).norm() / want.double().norm())
            if off > ROUNDING or not torch.equal(got, again):
                raise ArithmeticError(f"{slot} {choice}: off by {off:.3g}, or other bits in a second run")
            record(slot, choice, took, off)
            if took < best:
                best, stays = took, trial
        held = stays
    record("best", held, best)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="+", metavar="ROWSxCONTEXT")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--slots", nargs="*", default=[], help="qkv, o, gate_up, down, paged, single, fuses")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile in N processes first")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("perf.bench.layer times compiled kernels and there is no CUDA device here: run it on a GPU")
    points = [Point(args.shape, *map(int, text.split("x"))) for text in args.points]
    if args.compile:
        work = [(p, {slot: choice}) for p in points for slot in args.slots for choice in p.tried(slot)]
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(compile_share, [work[i :: args.compile] for i in range(args.compile)])
    found = []
    for point in points:
        found += measure(point, args.slots)
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
