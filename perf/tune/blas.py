"""Measures cublasLt's algorithms for products of many rows, and how far the best is ahead of what torch takes.

    python -m perf.tune.blas [--rows 128 1024 …] [--shape qwen3-4b …] [--json FILE] [--again FILE …] [--table FILE]

Each candidate multiplies by weights that are all different (none is in the cache), in a CUDA graph. Candidates are the
heuristic's answers, likely tiles, and other clusters and options of the best of those; the first few that are within
rounding of float32 and give the same bits twice are then timed in turn with torch, in an order drawn anew each round.
The chip's clock wanders by a few per cent, so a table is made from finalists that are measured --again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.linear.blas import Algorithm, Blas, Plan, Product, Refused
from kernels.linear.dense import linear
from kernels.weight import Dense
from kernels.workspace import Workspace
from perf.provenance import provenance
from perf.tune.linear import SHAPES, products
from perf.tune.linear import Product as Part

# what prompts and mixed steps are padded to (engine.runner.graphs), and a step's budget
ROWS = (96, 128, 192, 256, 384, 512, 640, 768, 1024, 1088, 1152, 1280, 1536, 2048, 2176, 4096, 8192)
COLD_BYTES = 2.0e8
ANSWERS = 200
TILES = 20
REFINED = 2
ROUNDS = 25
LARGEST_ERROR = 4e-3
WORTH = 1.02
LAYERS = 6
# cublasLt's numbers of clusters: one, two along the outputs, two along the rows
CLUSTERS = (2, 3, 5)
# options of its Hopper kernels, as their names tell: a tile by one group of warps or by two together
ALONE, COOPERATIVE = range(4), range(4, 8)
KINDS = ((CLUSTERS[2], ALONE[2]), (CLUSTERS[2], COOPERATIVE[3]))


def tile_sizes() -> dict[int, tuple[int, int]]:
    """cublasLt's numbers of tiles → their outputs and rows, from its header; empty when there is none."""
    places = [Path(torch.__file__).parents[1] / "nvidia/cu13/include", Path("/usr/local/cuda/include")]
    for place in places:
        header = place / "cublasLt.h"
        if header.exists():
            made = {}
            for line in header.read_text().splitlines():
                name, _, number = line.strip().rstrip(",").partition(" = ")
                if name.startswith("CUBLASLT_MATMUL_TILE_") and "x" in name and number.isdigit():
                    outputs, _, rows = name.removeprefix("CUBLASLT_MATMUL_TILE_").partition("x")
                    made[int(number)] = (int(outputs), int(rows))
            return made
    return {}


def turns(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> list[list[float]]:
    """Seconds of each graph's replays, one of each a round, in an order drawn anew: the chip's clock follows its power,
    and none shall always run behind the same other one."""
    draw = random.Random(0)
    order = list(range(len(graphs)))
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(rounds):
        draw.shuffle(order)
        for i in order:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[i].replay()
            stop.record()
            events[i].append((start, stop))
    torch.cuda.synchronize()
    return [[start.elapsed_time(stop) * 1e-3 for start, stop in pairs] for pairs in events]


def captured(calls: Callable[[], None]) -> torch.cuda.CUDAGraph:
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph


def tried(
    library: Blas, product: Product, base: Algorithm, tiles: list[int], kinds: tuple[tuple[int, int], ...]
) -> list[Plan]:
    """Plans of `tiles` in `kinds` of (cluster, custom option), as far as the library takes them."""
    found = []
    for tile, (cluster, custom) in itertools.product(tiles, kinds):
        with contextlib.suppress(Refused):
            found.append(library.plan(product, replace(base, tile=tile, cluster=cluster, custom=custom)))
    return found


def likely_tiles(product: Product, sizes: dict[int, tuple[int, int]], processors: int) -> list[int]:
    """Tiles by the time of their waves: what a tile multiplies, loads and stores."""

    def cost(tile: int) -> float:
        outputs, rows = sizes[tile]
        area = outputs * rows
        waves = -(-(-(-product.outputs // outputs) * -(-product.rows // rows)) // processors)
        return waves * ((area + 64 * (outputs + rows)) * product.inputs + area * 400)

    fit = [t for t, (outputs, rows) in sizes.items() if 4096 <= outputs * rows <= 45056 and min(outputs, rows) >= 64]
    return sorted(fit, key=cost)[:TILES]


class Bench:
    """One product: its operands, with weights that are all different, and the ways to compute it."""

    def __init__(self, library: Blas, part: Part, rows: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.product = Product(rows, part.k, part.weight_rows, stride=part.k)
        self.copies = max(2, min(12, round(COLD_BYTES / part.bytes)))
        self._library, self._summed = library, part.residual
        self._x = torch.randn(rows, part.k, device=device).bfloat16()
        weights = torch.empty(self.copies, part.weight_rows, part.k, device=device, dtype=torch.bfloat16)
        self._weights = weights.normal_(0, 0.02)
        self._start = torch.randn(rows, part.weight_rows, device=device).bfloat16()
        self._y = self._start.clone()
        self._want = self._x.float() @ self._weights[0].float().t()
        if self._summed:
            self._want += self._start.float()

    def by_torch(self) -> None:
        for weight in self._weights:
            if self._summed:
                torch.addmm(self._y, self._x, weight.t(), out=self._y)
            else:
                torch.mm(self._x, weight.t(), out=self._y)

    def by(self, plan: Plan) -> Callable[[], None]:
        def calls() -> None:
            for weight in self._weights:
                self._multiply(plan, weight)

        return calls

    def right(self, plan: Plan) -> bool:
        """Within rounding of float32, and the same bits twice."""
        results = []
        for _ in range(2):
            self._y.copy_(self._start) if self._summed else self._y.fill_(float("nan"))
            self._multiply(plan, self._weights[0])
            results.append(self._y.clone())
        off = float((results[0].float() - self._want).norm() / self._want.norm())
        self._y.copy_(self._start)
        return off < LARGEST_ERROR and torch.equal(*results)

    def _multiply(self, plan: Plan, weight: torch.Tensor) -> None:
        self._library.multiply(plan, self._x, weight, self._y if self._summed else None, self._y)


def search(library: Blas, bench: Bench, sizes: dict[int, tuple[int, int]]) -> list[Plan]:
    """The heuristic's answers, likely tiles, and other clusters and options of the best of them; fastest first."""
    held: dict[Algorithm, tuple[float, Plan]] = {}

    def time_new(plans: list[Plan]) -> list[Plan]:
        for plan in plans:
            if plan.algorithm not in held:
                graph = captured(bench.by(plan))
                graph.replay()
                held[plan.algorithm] = statistics.median(turns([graph], 3)[0]), plan
        return [plan for _, plan in sorted(held.values(), key=lambda pair: pair[0])]

    product = bench.product
    answers = library.heuristic(product, ANSWERS)
    base = replace(answers[0].algorithm, split=1, reduction=0)
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    time_new(answers)
    ranked = time_new(tried(library, product, base, likely_tiles(product, sizes, processors), KINDS))
    for algorithm in [plan.algorithm for plan in ranked if plan.algorithm.split == 1][:REFINED]:
        customs = COOPERATIVE if algorithm.custom in COOPERATIVE else ALONE
        kinds = tuple(itertools.product(CLUSTERS, customs))
        ranked = time_new(tried(library, product, base, [algorithm.tile], kinds))
    return ranked


def known(library: Blas, product: Product, earlier: list[dict[str, Any]]) -> list[Plan]:
    """The finalists of earlier records of this product."""
    found: dict[Algorithm, Plan] = {}
    for record in earlier:
        if (record["rows"], record["inputs"], record["outputs"]) == (product.rows, product.inputs, product.outputs):
            for finalist in record["finalists"]:
                algorithm = Algorithm(*finalist["algorithm"])
                with contextlib.suppress(Refused):
                    found.setdefault(algorithm, library.plan(product, algorithm))
    return list(found.values())


def measure(bench: Bench, plans: list[Plan], most: int) -> dict[str, Any]:
    """Times the first `most` plans that are right in turn with torch."""
    right: list[Plan] = []
    wrong: list[Algorithm] = []
    for plan in plans:
        if len(right) == most:
            break
        if bench.right(plan):
            right.append(plan)
        else:
            wrong.append(plan.algorithm)
    taken = turns([captured(bench.by_torch), *(captured(bench.by(plan)) for plan in right)], ROUNDS)
    by_torch, *medians = (statistics.median(times) / bench.copies * 1e6 for times in taken)
    ranked = sorted(zip(medians, right, strict=True), key=lambda pair: pair[0])
    product = bench.product
    return {
        "rows": product.rows,
        "inputs": product.inputs,
        "outputs": product.outputs,
        "torch_us": by_torch,
        "best_us": ranked[0][0],
        "best": list(astuple(ranked[0][1].algorithm)),
        "finalists": [
            {"us": us, "algorithm": list(astuple(p.algorithm)), "workspace": p.workspace} for us, p in ranked
        ],
        "wrong": [list(astuple(algorithm)) for algorithm in wrong],
        "tried": len(plans),
    }


def show(record: dict[str, Any], sizes: dict[int, tuple[int, int]]) -> None:
    algorithm = Algorithm(*record["best"])
    flops = 2 * record["rows"] * record["inputs"] * record["outputs"]
    outputs, rows = sizes.get(algorithm.tile, (0, 0))
    print(
        f"{record['shape']} {record['product']:8} {record['rows']:5}: torch {record['torch_us']:7.1f}"
        f" ({flops / record['torch_us'] / 1e6:3.0f} TFLOP/s) best {record['best_us']:7.1f}"
        f" {record['torch_us'] / record['best_us']:5.3f}x  {outputs}x{rows} {said(algorithm)} of {record['tried']}"
        + (f" WRONG {record['wrong']}" if record["wrong"] else ""),
        flush=True,
    )


def said(algorithm: Algorithm) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(algorithm).items() if value)


def write_table(path: Path, gpu: str, version: int, records: list[dict[str, Any]]) -> None:
    """Puts the algorithms that were worth it, and null where torch's own was as fast, into a table of tuned numbers, in
    the place of those of that version of the library; a table that is not there yet inherits the others' numbers."""
    made: dict[str, dict[str, list[int] | None]] = {}
    for record in sorted(records, key=lambda r: (r["outputs"], r["inputs"], r["rows"])):
        worth = record["torch_us"] > WORTH * record["best_us"]
        sizes = f"{record['outputs']}x{record['inputs']}"
        made.setdefault(sizes, {})[str(record["rows"])] = record["best"] if worth else None
    note = f"numbers of an H200; algorithms measured on {gpu}"
    held: dict[str, Any] = {"gpus": [gpu], "inherits": "h200", "note": note}
    if path.exists():
        held = json.loads(path.read_text())
    held.setdefault("algorithms", {})[str(version)] = made
    path.write_text(written(held) + "\n")


def written(value: Any, depth: int = 0) -> str:
    """As JSON: what holds no more than a tile on one line."""
    flat = not isinstance(value, dict) or all(not isinstance(v, (dict, list)) and v is not None for v in value.values())
    if flat and depth > 1:
        return json.dumps(value)
    if not isinstance(value, dict):
        return json.dumps(value)
    pad = " " * (depth + 1)
    inner = ",\n".join(f"{pad}{json.dumps(key)}: {written(held, depth + 1)}" for key, held in value.items())
    return "{\n" + inner + "\n" + " " * depth + "}"


def layer(shape: str, rows: int) -> str:
    """Times a layer's four products with what stands around them, by the table and by torch, in turn."""
    _, hidden, attention, _, _, _ = SHAPES[shape]
    parts = products(shape)[:4]
    weights = [
        [torch.empty(p.weight_rows, p.k, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02) for p in parts]
        for _ in range(LAYERS)
    ]
    g = torch.rand(hidden, device="cuda").bfloat16()
    noise = torch.randn(rows, hidden, device="cuda").bfloat16()
    x = torch.empty_like(noise)
    o = torch.randn(rows, attention, device="cuda").bfloat16()

    def chain(workspace: Workspace) -> None:
        x.copy_(noise)
        for qkv, out, gate_up, down in weights:
            linear(workspace, x, Dense(qkv), norm_weight=g)
            h = linear(workspace, o, Dense(out), residual=x)
            inner = linear(workspace, h, Dense(gate_up), norm_weight=g, activation="silu")
            linear(workspace, inner, Dense(down), residual=h)

    graphs, results = [], []
    # graphs read and write their workspaces: these outlive them
    workspaces = [Workspace(torch.device("cuda"), tuned_gemms=on) for on in (True, False)]
    for workspace in workspaces:
        graphs.append(captured(partial(chain, workspace)))
        graphs[-1].replay()
        results.append(x.float())
    off = float((results[0] - results[1]).norm() / results[1].norm())
    by_table, by_torch = (statistics.median(times) / LAYERS * 1e6 for times in turns(graphs, ROUNDS))
    return (
        f"{shape} layer {rows:5}: torch {by_torch:7.1f} table {by_table:7.1f} {by_torch / by_table:5.3f}x"
        f" (results apart {off:.1e})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", default=["qwen3-4b"])
    parser.add_argument("--only", nargs="*", default=[], help="names of products")
    parser.add_argument("--again", type=Path, nargs="*", default=[], help="only finalists of these files of --json")
    parser.add_argument("--finalists", type=int, default=5, help="how many are timed in turn with torch")
    parser.add_argument("--json", type=Path, help="append every figure to this file")
    parser.add_argument("--table", type=Path, help="put algorithms that are worth it here: kernels/tuned/GPU.json")
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[], help="rows to time a layer's products with at the end"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new measurements after so long")
    args = parser.parse_args()
    began = time.monotonic()
    sizes = tile_sizes()
    library = Blas(torch.device("cuda", torch.cuda.current_device()))
    print(f"cublasLt {library.version}, {len(sizes)} tiles named", flush=True)
    earlier = [json.loads(line) for path in args.again for line in path.read_text().splitlines()]
    done: set[tuple[int, int, int]] = set()
    records: list[dict[str, Any]] = []
    for rows, shape in itertools.product(args.rows, args.shape):
        for part in products(shape)[:4]:
            if (args.only and part.name not in args.only) or time.monotonic() - began > args.seconds:
                continue
            size = (rows, part.k, part.weight_rows)
            if size in done:
                continue
            done.add(size)
            bench = Bench(library, part, rows)
            plans = known(library, bench.product, earlier) if args.again else search(library, bench, sizes)
            if not plans:
                continue
            record = {"shape": shape, "product": part.name, **measure(bench, plans, args.finalists)}
            records.append(record)
            show(record, sizes)
            if args.json:
                with args.json.open("a") as log:
                    log.write(json.dumps({**record, **provenance()}) + "\n")
    if args.table:
        write_table(args.table, torch.cuda.get_device_name(), library.version, records)
    for shape, rows in itertools.product(args.shape, args.layers):
        print(layer(shape, rows), flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
