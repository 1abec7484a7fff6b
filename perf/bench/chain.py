"""Times attention between the products around it, as a decoder's layers chain them.

    python -m perf.bench.chain [LINES …]

LINES is a step's sequences as QUERIESxCONTEXT, comma-separated, several as COUNT*QUERIESxCONTEXT: 64*1x1088,768x768.
Each figure is microseconds of qkv product, rope, KV write, attention and out product, over the weights and caches of
some layers in turn, in a CUDA graph with the bound on contexts that an engine has. Beside it stand the same with two
ops for sequences of one token (`fused` off), with one op for all of those, with prompts and decode sequences in one
order instead of side by side, and the two products alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels.linear.dense import linear
from kernels.paged_attention.cases import SeqShape
from kernels.rope_attention.cases import case
from kernels.rope_attention.dispatch import DISPATCH, cannot_fuse
from kernels.rope_attention.kernel import rope_attention
from kernels.testing import seeded, workspace
from kernels.weight import Dense
from kernels.workspace import Workspace
from perf.kernels import graph_seconds
from perf.provenance import provenance

HEADS, GROUPS, DIM, HIDDEN = 32, 8, 128, 2560
LAYERS, CALLS, BOUND = 6, 24, 20480
POINTS = (
    "1x256",
    "1x4096",
    "2*1x600",
    "4*1x1088",
    "8*1x1088",
    "64*1x1088",
    "256*1x384",
    "64*1x1088,768x768",
    "64*1x1088,256x1024,512x512",
    "8*1x1088,512x768",
    "8*1024x1024",
)


def lines(text: str) -> list[SeqShape]:
    made: list[SeqShape] = []
    for part in text.split(","):
        count, _, line = part.rpartition("*")
        queries, context = line.split("x")
        made += [(int(queries), int(context))] * int(count or 1)
    return made


@contextlib.contextmanager
def _in_order(workspace: Workspace, wanted: bool = True) -> Iterator[Callable[[], None]]:
    yield lambda: None


def microseconds(call: Callable[[int], Any], samples: int) -> float:
    """Median of a call in a graph of CALLS of them."""

    def calls() -> None:
        for i in range(CALLS):
            call(i)

    return graph_seconds(calls, samples) * 1e6 / CALLS


def measure(text: str, weights: Sequence[tuple[torch.Tensor, ...]], samples: int) -> dict[str, Any]:
    device = torch.device("cuda")
    made = case(text, torch.bfloat16, lines(text), HEADS, GROUPS, DIM, qk_norm=True, strided=True, bound=BOUND)
    layers = [made.make(device, seeded(device, seed)) for seed in range(2 if made.bytes > 4e8 else LAYERS)]
    tokens = len(layers[0]["positions"])
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    o = torch.randn(tokens, HEADS * DIM, device=device, dtype=torch.bfloat16)

    def products(i: int, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        qkv, out, norm = weights[i % LAYERS]
        return linear(workspace(), attend(linear(workspace(), x, Dense(qkv), norm_weight=norm)), Dense(out))

    def layer(i: int, one: bool) -> torch.Tensor:
        given = {**layers[i % len(layers)], "fused": one}
        return products(i, lambda qkv: rope_attention(workspace(), **{**given, "qkv": qkv}).flatten(1))

    figures = {
        "us": microseconds(lambda i: layer(i, True), samples),
        "two_ops_us": microseconds(lambda i: layer(i, False), samples),
        "products_us": microseconds(lambda i: products(i, lambda qkv: o), samples),
    }
    with mock.patch.object(Workspace, "branch", _in_order):
        figures["in_order_us"] = microseconds(lambda i: layer(i, True), samples)
    with DISPATCH.changed("fused", declines=cannot_fuse):
        figures["one_op_for_all_us"] = microseconds(lambda i: layer(i, True), samples)
    return {"lines": text, **{name: round(value, 2) for name, value in figures.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times attention between the products around it.")
    parser.add_argument("lines", nargs="*", default=list(POINTS), metavar="LINES")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("perf.bench.chain times compiled kernels and there is no CUDA device here: run it on a GPU")
    sizes = ((HEADS + 2 * GROUPS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (HIDDEN,)
    weights = [
        tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02 for size in sizes) for _ in range(LAYERS)
    ]
    found = []
    for text in args.lines:
        found.append(measure(text, weights, args.samples))
        print(found[-1], flush=True)
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
