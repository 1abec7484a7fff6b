"""What a step would take on N ranks. A model and not a measurement: one GPU's measured costs shared out, with what sums
between GPUs took on two.

    python -m perf.simulate.ranks costs.jsonl 32:4096:128256 --ranks 2 4 8 [--rows 1 64 256] [--sums nccl one-shot]

Costs are of `perf.simulate.step_costs` on one GPU; the shape is LAYERS:HIDDEN:VOCABULARY. A step of N ranks takes 1 / N
of one GPU's, `--whole` ms of it whole on every rank, and what crosses ranks: two sums a layer and one for the
embedding, in 16 bits, and each rank's candidates for the draw, or with `--whole-logits` all logits.
`perf.simulate.schedule --shape` plays loads over it.

Sums were measured on two GPUs that NVLink joins. For N their bytes and their way are scaled by what the algorithm sends
(`SUMS`), each GPU having the same links to all; nothing is overlapped with computing, and no host is crossed.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.plan import NO_SHAPES, MixedShapes
from perf.simulate.step_costs import Cost, read

_KB, _MB = 1 << 10, 1 << 20
NUMBER_BYTES = 2
CANDIDATE_BYTES = 528  # of a rank for an entry: kernels/sample_candidates


@dataclass(frozen=True)
class Sum:
    """An all-reduce. measured: (bytes, µs) on two H200 (NV18). way, sent: how many times two ranks' latency, and bytes,
    N ranks take."""

    measured: tuple[tuple[int, float], ...]
    way: Callable[[int], float]
    sent: Callable[[int], float]

    def us(self, size: int, ranks: int) -> float:
        """Of `size` bytes on each of `ranks`."""
        if ranks == 1:
            return 0.0
        latency = self.measured[0][1]
        return latency * self.way(ranks) + (self._of_two(size) - latency) * self.sent(ranks)

    def _of_two(self, size: int) -> float:
        """Linear between what was measured, and on as between the last two; no less than the first."""
        sizes = [point[0] for point in self.measured]
        at = max(1, min(bisect_right(sizes, size), len(sizes) - 1))
        (few, low), (many, high) = self.measured[at - 1], self.measured[at]
        return max(self.measured[0][1], low + (size - few) * (high - low) / (many - few))


def _in_turn(ranks: int) -> float:
    """Reduce, then gather: 2 (N - 1) / N of the bytes leave each rank, which is once for two."""
    return 2 * (ranks - 1) / ranks


# Times of NCCL and of torch's symmetric memory, bf16, captured in graphs. Ways: NCCL's tree is log2 N deep; the others
# read all peers at once behind one barrier, whole or (two-shot) a part of each.
SUMS = {
    "nccl": Sum(
        ((8 * _KB, 10.8), (128 * _KB, 11.5), (512 * _KB, 14.5), (2 * _MB, 31.9), (16 * _MB, 84.7)),
        lambda n: math.log2(n),
        _in_turn,
    ),
    "one-shot": Sum(
        ((8 * _KB, 6.3), (128 * _KB, 7.4), (512 * _KB, 9.4), (2 * _MB, 18.7)), lambda n: 1.0, lambda n: n - 1.0
    ),
    "two-shot": Sum(((8 * _KB, 6.2), (128 * _KB, 7.1), (512 * _KB, 7.6), (2 * _MB, 12.9)), lambda n: 1.0, _in_turn),
}


@dataclass(frozen=True)
class Shape:
    """Of a model: layers, width of the hidden state, tokens of the vocabulary."""

    layers: int
    hidden: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From LAYERS:HIDDEN:VOCABULARY. Raises ValueError."""
        numbers = text.split(":")
        if len(numbers) != 3 or not all(number.isdigit() and int(number) for number in numbers):
            raise ValueError(f"{text!r} is no shape: write LAYERS:HIDDEN:VOCABULARY, as 32:4096:128256")
        return cls(*map(int, numbers))


@dataclass(frozen=True)
class Ranks:
    """How a step is shared out. sums: of `SUMS`, of which each size takes the fastest. whole_ms: of one GPU's step,
    what every rank does. whole_logits: draws come from the logits of all ranks, not from candidates."""

    shape: Shape
    count: int
    sums: tuple[str, ...] = ("nccl",)
    whole_ms: float = 0.0
    whole_logits: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or not self.sums or self.whole_ms < 0:
            raise ValueError(f"{self} is no way to share a step out")

    def communication_ms(self, tokens: int, entries: int) -> float:
        """Of a step of `tokens` tokens, of which `entries` draw."""
        hidden = self._us(tokens * self.shape.hidden * NUMBER_BYTES)
        # Putting together is the second half of a sum.
        each = self.shape.vocabulary * NUMBER_BYTES if self.whole_logits else self.count * CANDIDATE_BYTES
        return ((2 * self.shape.layers + 1) * hidden + self._us(entries * each) / 2) / 1e3

    def step_ms(self, alone_ms: float, tokens: int, entries: int) -> float:
        """Of a step that takes one GPU `alone_ms`."""
        whole = min(self.whole_ms, alone_ms)
        return whole + (alone_ms - whole) / self.count + self.communication_ms(tokens, entries)

    def _us(self, size: int) -> float:
        return min(SUMS[name].us(size, self.count) for name in self.sums)


def shared_out(costs: Iterable[Cost], ranks: Ranks, shapes: MixedShapes = NO_SHAPES) -> list[Cost]:
    """What was measured on one GPU, as it would be on `ranks`. Launches take a host as long as before."""
    made = []
    for cost in costs:
        tokens = shapes.padded(cost.rows, cost.prompt, cost.chunks) if cost.rows and cost.prompt else 0
        tokens = max(tokens, cost.rows * (1 + cost.drafts) + cost.prompt)
        entries = cost.rows * (1 + cost.drafts) + cost.chunks
        step_ms = ranks.step_ms(cost.step_ms, tokens, entries)
        fields = (cost.rows, cost.context, cost.prompt, cost.chunks, step_ms, cost.launch_ms, cost.drafts)
        made.append(Cost(*fields))
    return made


def table(costs: Iterable[Cost], ranks: Sequence[Ranks]) -> list[str]:
    """A Markdown table: of each step, ms on one GPU, then on N ranks ms and communication's share. Of a step that was
    measured again the last counts."""
    last = {(cost.rows, cost.prompt, cost.drafts): cost for cost in costs}
    rows = [["rows", "prompt tokens", "one GPU", *(f"{of.count} ranks" for of in ranks)]]
    rows.append(["---"] * len(rows[0]))
    for _, cost in sorted(last.items()):
        computed = cost.rows * (1 + cost.drafts)
        step = (computed + cost.prompt, computed + cost.chunks)
        cells = [str(cost.rows), str(cost.prompt), f"{cost.step_ms:.2f}"]
        for of in ranks:
            all_ms, communication_ms = of.step_ms(cost.step_ms, *step), of.communication_ms(*step)
            cells.append(f"{all_ms:.2f} ({communication_ms / all_ms:.0%})")
        rows.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs", type=Path, help="JSON lines of perf.simulate.step_costs, of one model on one GPU")
    parser.add_argument("shape", type=Shape.parse, metavar="LAYERS:HIDDEN:VOCABULARY")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sums", nargs="+", choices=sorted(SUMS), default=["nccl"], help="the fastest for each size")
    parser.add_argument("--whole", type=float, default=0.0, help="ms of a step that every rank does whole")
    parser.add_argument("--whole-logits", action="store_true", help="draws that candidates do not say enough for")
    parser.add_argument("--rows", type=int, nargs="*", help="steps of so many rows alone")
    args = parser.parse_args(arguments)
    costs = [cost for cost in read(args.costs) if args.rows is None or cost.rows in args.rows]
    print("A model, not a measurement: ms of a step, and communication's share of it.\n")
    shared = [Ranks(args.shape, n, tuple(args.sums), args.whole, args.whole_logits) for n in args.ranks]
    print("\n".join(table(costs, shared)))


if __name__ == "__main__":
    main()
