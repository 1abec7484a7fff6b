"""Measures the cuts of products with quantized weights on the GPU: experts by tiles of pairs, and the ways that a
packed dense weight is multiplied with more rows than one tile has.

    python -m perf.tune.quantized [--experts gpt-oss-20b] [--tokens 1 64] [--dense qwen3-8b] [--group 32] [--json FILE]
    python -m perf.tune.quantized --experts qwen3-30b-a3b-fp8 --tokens 64 --among 8     as few experts as 8 are chosen

Each figure is a chain of calls over several layers' weights (so that little of them is in the cache), inside a CUDA
graph. Every variant is compared with the first of its list.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.linear import dense as dense_linear
from kernels.linear.cases import fp4, packed_int
from kernels.linear.mixed_input import mixed_input_linear
from kernels.linear.packed_dispatch import mixed_input_tile, row_tile, stream_tile
from kernels.linear.packed_rows import packed_linear
from kernels.linear.quantized_stream import packed_stream
from kernels.linear.skinny import counters
from kernels.linear.stream import StreamTile
from kernels.linear.unpack import unpacked
from kernels.moe_gemm import dense as dense_moe
from kernels.moe_gemm import packed, w8a8
from kernels.moe_gemm.alone_cut import ALONE_PAIRS, AloneCut
from kernels.moe_gemm.fp8_alone import fp8_alone_moe
from kernels.moe_gemm.grouped_fp8 import PAIRS, GroupedFp8Tile, grouped_fp8_moe
from kernels.moe_gemm.order import placed
from kernels.moe_gemm.quantized_dispatch import pair_tiles
from kernels.moe_gemm.quantized_ring import RingTile, quantized_ring_moe
from kernels.moe_gemm.tiles import PairTile
from kernels.routing import ExpertBiases
from kernels.testing import seeded, workspace
from kernels.weight import Dense, Fp4, Fp8, PackedInt
from kernels.weight.inputs import Inputs
from perf.kernels import graph_seconds
from perf.provenance import provenance

Expert = Fp4 | Fp8 | PackedInt


@dataclass(frozen=True)
class Shape:
    """Of a layer's experts: kind of weight, hidden size, inner channels, experts, those of a token."""

    kind: str
    hidden: int
    inter: int
    experts: int
    k: int


EXPERTS = {
    "gpt-oss-20b": Shape("mxfp4", 2880, 2880, 32, 4),
    "qwen3-30b-a3b-fp8": Shape("fp8", 2048, 768, 128, 8),
    "qwen3-235b-a22b-fp8": Shape("fp8", 4096, 1536, 128, 8),
    "deepseek-v3/2": Shape("fp8", 7168, 2048, 128, 8),
    "kimi-k2-int4": Shape("int4", 7168, 2048, 48, 8),
    "gpt-oss-120b": Shape("mxfp4", 2880, 2880, 128, 4),
    "deepseek-v4-flash": Shape("mxfp4", 4096, 2048, 256, 6),
    "deepseek-v4-flash/2": Shape("mxfp4", 4096, 1024, 256, 6),
}
# (outputs, inputs) of each product; gate and up together are one.
DENSE = {
    "llama-3.1-8b": ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)),
    "qwen3-8b": ((6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False)),
}


@dataclass(frozen=True)
class Variant:
    rows: int
    up: PairTile
    down: PairTile
    varied: str
    ring: RingTile | None = None
    alone: tuple[AloneCut, AloneCut] | None = None


# Of a few pairs a tile: outputs, inputs, stages, warps.
FEW = (
    *itertools.product((16, 32), (128, 256), (3, 5), (2, 4)),
    *itertools.product((64,), (128, 256), (2, 3, 4), (4,)),
    *itertools.product((128,), (128,), (2, 3), (4, 8)),
)
# Tiles of the ring kernel: pairs, rows of a matrix, stages.
RINGS = (*itertools.product((8, 16), (64, 128), (2, 3, 4, 6)), *itertools.product((32,), (64, 128), (2, 3)))
RING_TOKENS = 512
# Of a few pairs of 8-bit floats: programs that share a tile, stages.
ALONE = tuple(AloneCut(splits, stages) for splits, stages in itertools.product((1, 2, 4), (2, 3, 4, 6)))


def weight(kind: str, shape: tuple[int, ...]) -> Expert:
    device, g = torch.device("cuda"), seeded(torch.device("cuda"))
    if kind == "mxfp4":
        return fp4(g, device, shape, 32)
    if kind == "int4":
        return packed_int(g, device, shape, 4, 32)
    data = (torch.randn(shape, device=device) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(shape[0], shape[1] // 128, shape[2] // 128, device=device) * shape[-1] ** -0.5 / 64
    return Fp8(data, scale, (128, 128), Inputs("fp8", 128))


def variants(shape: Shape, tokens: int, cuts: Collection[str]) -> Iterator[Variant]:
    rows, up, down = pair_tiles(tokens * shape.k, shape.experts, torch.bfloat16)
    yield Variant(rows, up, down, "base")
    if tokens <= RING_TOKENS and shape.kind != "fp8":
        yield Variant(0, up, down, "ring")
    if tokens * shape.k <= ALONE_PAIRS and shape.kind == "fp8":
        yield Variant(0, up, down, "alone")
        if "rings" in cuts:
            yield from (Variant(0, up, down, "alone", alone=made) for made in itertools.product(ALONE, ALONE))
    if tokens > 32 and shape.kind != "fp8":
        yield Variant(0, up, down, "written out")
    if shape.kind == "fp8":
        yield Variant(0, up, down, "grouped")
    if "rings" in cuts and tokens <= RING_TOKENS and shape.kind != "fp8":
        yield from (Variant(0, up, down, "ring", tile) for tile in ring_tiles(shape, tokens))
    if "tiles" not in cuts:
        return
    many = tokens * shape.k // shape.experts
    heights = (16,) if many < 8 else (16, 32) if many < 128 else (64, 128, 256)
    widths = (128,) if shape.kind == "fp8" else (128, 256)
    for height in heights:
        made = itertools.product((64, 128), widths, (2, 3), (4, 8)) if height >= 64 else FEW
        for n, m, stages, warps in made:
            if m not in widths or n * height > 1 << 14 or (n * height == 1 << 14 and warps == 4):
                continue
            tile = PairTile(n, m, stages, warps)
            if height == rows:
                yield Variant(height, tile, down, "up")
                yield Variant(height, up, tile, "down")
            else:
                yield Variant(height, tile, tile, "both")


def ring_tiles(shape: Shape, tokens: int) -> Iterator[RingTile]:
    """Those that such a load may take: pairs alone have the fewest columns."""
    for pairs, rows, stages in RINGS:
        if pairs > 8 and tokens * shape.k <= ALONE_PAIRS:
            continue
        yield RingTile(pairs, rows, stages)


def experts_call(
    shape: Shape, tables: tuple[Expert, Expert], tokens: int, seed: int, among: int | None = None
) -> Callable[[Variant], Any]:
    """The experts of a layer for `tokens` tokens, each of which chooses among the first `among` experts."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=g, device="cuda").bfloat16()
    drawn = torch.rand(tokens, among or shape.experts, generator=g, device="cuda").argsort(-1)
    chosen, weights = drawn[:, : shape.k].int(), torch.rand(tokens, shape.k, generator=g, device="cuda")
    gate_up, down = tables
    biases = None
    if shape.kind == "mxfp4":
        wide = torch.zeros(shape.experts, 2 * shape.inter, device="cuda").bfloat16()
        biases = ExpertBiases(wide, torch.zeros(shape.experts, shape.hidden, device="cuda").bfloat16())
    activation = "silu" if biases is None else "swiglu_oai"

    def dense_experts(gate_up: Fp4 | PackedInt, down: Fp4 | PackedInt) -> torch.Tensor:
        up, out = (Dense(unpacked(workspace(), flat(w), x.dtype).view(w.shape)) for w in (gate_up, down))
        return dense_moe.moe_gemm(workspace(), x, up, out, weights, chosen, x, activation, biases=biases)

    def call(variant: Variant) -> torch.Tensor:
        if variant.varied == "alone":
            assert isinstance(gate_up, Fp8)
            assert isinstance(down, Fp8)
            return fp8_alone_moe(
                workspace(), x, gate_up, down, weights, chosen, x, activation, None, biases, variant.alone
            )
        if variant.varied == "ring":
            assert not isinstance(gate_up, Fp8)
            assert not isinstance(down, Fp8)
            return quantized_ring_moe(
                workspace(), x, gate_up, down, weights, chosen, x, activation, None, biases, variant.ring
            )
        if variant.varied == "grouped":
            assert isinstance(gate_up, Fp8)
            assert isinstance(down, Fp8)
            places = placed(workspace(), chosen, shape.experts, PAIRS)
            return grouped_fp8_moe(
                workspace(), x, gate_up, down, weights, chosen, x, activation, None, places, GroupedFp8Tile()
            )
        if variant.varied == "written out":
            assert not isinstance(gate_up, Fp8)
            assert not isinstance(down, Fp8)
            return dense_experts(gate_up, down)
        launch: Callable[..., torch.Tensor] = w8a8.w8a8_moe if shape.kind == "fp8" else packed.packed_moe
        cuts = (variant.rows, variant.up, variant.down)
        return launch(workspace(), x, gate_up, down, weights, chosen, x, activation, None, biases, *cuts)

    return call


def flat(weight: Fp4 | PackedInt) -> Fp4 | PackedInt:
    """Matrices one below another."""
    return replace(weight, data=weight.data.flatten(0, 1), scale=weight.scale.flatten(0, 1))


def tables(shape: Shape) -> tuple[Expert, Expert]:
    sizes = (shape.experts, 2 * shape.inter, shape.hidden), (shape.experts, shape.hidden, shape.inter)
    return weight(shape.kind, sizes[0]), weight(shape.kind, sizes[1])


def _compile(work: tuple[str, int, list[Variant]]) -> None:
    name, tokens, made = work
    call = experts_call(EXPERTS[name], tables(EXPERTS[name]), tokens, 0)
    for variant in made:
        try:
            call(variant)
        except Exception as problem:
            print("not compiled:", variant, str(problem).splitlines()[0][:100], flush=True)
    torch.cuda.synchronize()


def time_experts(name: str, tokens: int, layers: int, cuts: Collection[str], among: int | None) -> list[dict[str, Any]]:
    shape = EXPERTS[name]
    held = [tables(shape) for _ in range(layers)]
    calls = [experts_call(shape, held[i % layers], tokens, i, among) for i in range(12 if tokens <= 64 else 3)]
    found, want = [], None
    for variant in variants(shape, tokens, cuts):

        def chain(variant: Variant = variant) -> None:
            for call in calls:
                call(variant)

        try:
            got = calls[0](variant).float()
            seconds = graph_seconds(chain) / len(calls)
        except Exception as problem:
            print("failed:", variant, str(problem).splitlines()[0][:100])
            continue
        want = got if want is None else want
        error = float((got - want).norm() / want.norm())
        tile = variant.down if variant.varied == "down" else variant.up
        found.append(
            {
                "shape": name, "tokens": tokens, "among": among, "us": round(seconds * 1e6, 1),
                "error": round(error, 5), "varied": variant.varied, "rows": variant.rows,
                "tile": [tile.outputs, tile.inputs, tile.stages, tile.warps],
                "ring": None if variant.ring is None else [variant.ring.pairs, variant.ring.rows, variant.ring.stages],
                "alone": [[cut.splits, cut.stages] for cut in variant.alone or ()],
            }
        )  # fmt: skip
    return found


Route = Callable[[torch.Tensor, PackedInt], torch.Tensor]


def routes(rows: int, n: int, gated: bool, group: int) -> Iterator[tuple[str, Route]]:
    """Ways to multiply `rows` rows with a weight in groups of `group` inputs: each takes x and the weight."""
    activation = "silu" if gated else None

    def tiles(x: torch.Tensor, w: PackedInt) -> torch.Tensor:
        y = x.new_empty(len(x), n // 2 if gated else n)
        packed_linear(
            workspace(), x, w, None, None, y, activation, row_tile(rows, y.shape[1], x.shape[1], gated, False)
        )
        return y

    def written_out(x: torch.Tensor, w: PackedInt) -> torch.Tensor:
        return dense_linear.linear(workspace(), x, Dense(unpacked(workspace(), w, x.dtype)), activation=activation)

    def only_written_out(x: torch.Tensor, w: PackedInt) -> torch.Tensor:
        return unpacked(workspace(), w, x.dtype)

    def streamed(tile: StreamTile, inside: bool) -> Callable[[torch.Tensor, PackedInt], torch.Tensor]:
        def call(x: torch.Tensor, w: PackedInt) -> torch.Tensor:
            act, counts = activation if inside else None, counters(workspace())
            y = [packed_stream(workspace(), part, w, None, None, act, tile, counts) for part in x.split(tile.rows)]
            whole = torch.cat(y) if len(y) > 1 else y[0]
            return whole if inside or not gated else gated_activation(workspace(), whole, "silu")

        return call

    def mixed_input(x: torch.Tensor, w: PackedInt) -> torch.Tensor:
        tile = mixed_input_tile(rows, n, x.shape[1], 132)
        y = mixed_input_linear(workspace(), x, w, None, None, tile, counters(workspace()))
        return gated_activation(workspace(), y, "silu") if gated else y

    yield "tiles", tiles
    yield "written out", written_out
    if group % 128 == 0:
        yield "mixed input", mixed_input
    yield "only written out", only_written_out
    yield "parts of 64", streamed(stream_tile(64, n, gated, 132), True)
    for outputs, stages, warps, programs in (
        (64, 2, 4, 1),
        (64, 4, 4, 1),
        (128, 3, 8, 1),
        (128, 2, 8, 1),
        (64, 2, 4, 2),
    ):
        tile = StreamTile(128, outputs, 128, stages, programs, warps=warps)
        yield f"parts of 128 {outputs, stages, warps, programs}", streamed(tile, False)


def time_dense(name: str, rows: int, group: int) -> Iterator[dict[str, Any]]:
    for n, k, gated in DENSE[name]:
        layers = max(2, (160 << 20) // (n * k))
        held = [
            packed_int(seeded(torch.device("cuda"), i), torch.device("cuda"), (n, k), 4, group) for i in range(layers)
        ]
        x, want = torch.randn(rows, k, device="cuda").bfloat16(), None
        for route, call in routes(rows, n, gated, group):

            def chain(call: Callable[..., torch.Tensor] = call, x: torch.Tensor = x, held: Any = held) -> None:
                for w in held:
                    call(x, w)

            try:
                got = call(x, held[0]).float()
                seconds = graph_seconds(chain) / layers
            except Exception as problem:
                print("failed:", route, rows, n, k, str(problem).splitlines()[0][:100])
                continue
            want = got if want is None else want
            error = float((got - want).norm() / want.norm()) if got.shape == want.shape else 0.0
            yield {
                "shape": name, "rows": rows, "group": group, "n": n, "k": k, "route": route,
                "us": round(seconds * 1e6, 1), "error": round(error, 5),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="*", default=[], choices=EXPERTS)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 8192])
    parser.add_argument("--among", type=int, help="how many experts are chosen at all; all of them by default")
    parser.add_argument("--dense", nargs="*", default=[], choices=DENSE)
    parser.add_argument("--group", type=int, default=128, help="inputs of dense weights that share a scale")
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 96, 128, 192, 256, 512])
    parser.add_argument("--cuts", nargs="*", default=[], choices=("rings", "tiles"), help="vary these too")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--compile", type=int, default=12, help="processes")
    parser.add_argument("--shown", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = [(name, tokens) for name in args.experts for tokens in args.tokens]
    every: list[dict[str, Any]] = []
    parts = [
        (name, tokens, list(variants(EXPERTS[name], tokens, args.cuts))[i::4])
        for name, tokens in work
        for i in range(4)
    ]
    if parts and args.compile:
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(_compile, parts, chunksize=1)
    for name, tokens in work:
        found = time_experts(name, tokens, args.layers, args.cuts, args.among)
        every += found
        for varied in ("base", "ring", "alone", "grouped", "written out", "both", "up", "down"):
            best = sorted((f for f in found if f["varied"] == varied), key=lambda f: f["us"])[: args.shown]
            for f in best:
                cut = f["ring"] or f["alone"] or f["tile"]
                print(f"{name} {tokens:5} {varied:5} {f['us']:8} us, error {f['error']}, rows {f['rows']} {cut}")
        torch.cuda.empty_cache()
    for name, rows in itertools.product(args.dense, args.rows):
        for f in time_dense(name, rows, args.group):
            every.append(f)
            print(f"{name} {rows:4} rows {f['n']}x{f['k']}: {f['us']:7} us, error {f['error']}, {f['route']}")
    if args.json:
        args.json.write_text("".join(json.dumps({**f, **provenance()}) + "\n" for f in every))


if __name__ == "__main__":
    main()
