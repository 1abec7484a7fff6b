"""What drafts give at a fixed depth, and at depths that the engine chooses (`speculation.tokens: auto`), by a model of
what steps cost. No GPU.

    python -m perf.simulate.drafts [--streams 1 8 64] [--acceptance 0.82 0.4 0] [--requests 6] [--tokens 128]

Requests come one behind the other, each in a step with its prompt, in which nobody drafts. `Costs` holds what steps of
Qwen3-8B with an EAGLE-3 head took on an H200 (docs/experiments/2026-11-27-attention-of-drafted-entries.md); a draft is
accepted with the same probability everywhere. `--requests` counts them for each stream.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from engine.config import AUTO_DRAFTS
from engine.core.draft_depth import Acceptance, DraftDepth
from engine.core.plan import Draft, StepPlan, draft_depths

FIXED = (1, 2, 3, 4, 7)


@dataclass(frozen=True)
class Costs:
    """Milliseconds. first, row: of a plain step, and of each row past the first. depth: of a pass of what drafts.
    token: of each token that the step has more for drafts; compute_bound: more of each past 256. prompt: of a step with
    one."""

    first: float = 4.0
    row: float = 0.03
    depth: float = 0.42
    token: float = 0.008
    compute_bound: float = 0.012
    prompt: float = 27.0

    def step(self, rows: int, drafting: int, depth: int) -> float:
        """`drafting` of the rows are padded to so many drafts, and to a power of two."""
        plain = self.first + (rows - 1) * self.row
        tokens = (1 << (drafting - 1).bit_length()) * depth if drafting else 0
        return plain + depth * self.depth + tokens * self.token + max(0, rows + tokens - 256) * self.compute_bound


@dataclass
class Stream:
    """A request under way: tokens that it may still give."""

    left: int
    acceptance: Acceptance = field(default_factory=Acceptance)


class Play:
    """One load at one acceptance. depth: a fixed number of drafts, or `auto`'s choice."""

    def __init__(self, costs: Costs, acceptance: float, depth: int | DraftDepth, seed: int = 0) -> None:
        self.costs = costs
        self.now_ms = 0.0
        self._acceptance = acceptance
        self._depth = depth
        self._depths = draft_depths(depth if isinstance(depth, int) else AUTO_DRAFTS)
        self._random = random.Random(seed)
        self._measured: list[tuple[StepPlan, float]] = []

    def run(self, streams: int, requests: int, tokens: int) -> float:
        """Tokens a second of all."""
        live: list[Stream] = []
        waiting = requests
        while waiting or live:
            if waiting and len(live) < streams:
                waiting -= 1
                self.now_ms += self.costs.prompt
                live.append(self._admitted(tokens))
                for stream in live:
                    stream.left -= 1
            else:
                self._step(live)
            live = [stream for stream in live if stream.left > 0]
        return requests * tokens / self.now_ms * 1e3

    def _admitted(self, tokens: int) -> Stream:
        return Stream(tokens, Acceptance(self._depth.overall) if isinstance(self._depth, DraftDepth) else Acceptance())

    def _step(self, live: Sequence[Stream]) -> None:
        counts, follows = [0] * len(live), True
        if isinstance(self._depth, DraftDepth):
            follows = self._depth.follows(len(live))
            counts = self._depth.draft_counts(len(live), [stream.acceptance for stream in live])
        elif self._depth:
            counts = [self._depth] * len(live)
        counts = [min(count, stream.left - 1) for count, stream in zip(counts, live, strict=True)]
        deepest = next((depth for depth in self._depths if depth >= max(counts)), 0) if any(counts) else 0
        drafting = len(counts) - counts.count(0)
        took = self.costs.step(len(live), drafting, deepest) * self._random.uniform(1.0, 1.02)
        self.now_ms += took
        if isinstance(self._depth, DraftDepth):
            self._observe(self._depth, sorted(counts), took, follows)
        for stream, count in zip(live, counts, strict=True):
            accepted = 0
            while accepted < count and self._random.random() < self._acceptance:
                accepted += 1
            if count:
                stream.acceptance.drafted(count, accepted)
            stream.left -= 1 + accepted

    def _observe(self, depth: DraftDepth, counts: Sequence[int], took: float, follows: bool) -> None:
        """A step's time is known when the next one was planned."""
        rows = len(counts)
        drafts = {entry: Draft(count, 1, [1] * count) for entry, count in enumerate(counts) if count}
        lengths = [1 + count for count in counts]
        plan = StepPlan(1, [*range(rows)], [1] * rows, lengths, [True] * rows, drafts=drafts, follows=follows)
        self._measured.append((plan, took / 1e3))
        if len(self._measured) > 1:
            depth.observe_step(*self._measured.pop(0))


def chosen(costs: Costs, acceptance: float, streams: int, requests: int, tokens: int, seed: int = 0) -> float:
    """Tokens a second at the depths that the engine chooses."""
    return Play(costs, acceptance, DraftDepth(AUTO_DRAFTS, rests=True), seed).run(streams, requests, tokens)


def fixed(costs: Costs, acceptance: float, depth: int, streams: int, requests: int, tokens: int) -> float:
    """Tokens a second where each request has so many drafts in each step."""
    return Play(costs, acceptance, depth).run(streams, requests, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.82, 0.4, 0.0])
    parser.add_argument("--requests", type=int, default=6, help="for each stream")
    parser.add_argument("--tokens", type=int, default=128, help="that each request gives")
    args = parser.parse_args()
    table = Table("streams", "acceptance", "none, tok/s", *(f"{depth} x" for depth in FIXED), "auto x")
    for streams in args.streams:
        for acceptance in args.acceptance:
            load = streams, streams * args.requests, args.tokens
            none = fixed(Costs(), acceptance, 0, *load)
            found = [*(fixed(Costs(), acceptance, depth, *load) for depth in FIXED), chosen(Costs(), acceptance, *load)]
            table.add_row(str(streams), f"{acceptance:g}", f"{none:.0f}", *(f"{rate / none:.3f}" for rate in found))
    Console().print(table)


if __name__ == "__main__":
    main()
