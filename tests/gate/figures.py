"""What the gate measured, gathered for the table at its end and for docs/correctness.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.gate.verdict import Verdict


@dataclass(frozen=True)
class Figure:
    """What one test measured. `case` is the words of its name; `broken` if it is there to fail the gate."""

    shape: str
    dtype: str
    case: str
    broken: bool
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.shape:<12} {self.dtype:<9} {self.case:<44} {self.verdict}"


def markdown(figures: Sequence[Figure]) -> str:
    """Two tables: the largest of each figure over the ways a shape was played, and each broken engine."""
    lines = [
        "| shape | dtype | ways | positions | worst | regret | mean | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    right = sorted((f for f in figures if not f.broken), key=lambda f: (f.shape, f.dtype))
    for (shape, dtype), group in groupby(right, key=lambda f: (f.shape, f.dtype)):
        all_of_it = [figure.verdict for figure in group]
        most = [max(getattr(v, name) for v in all_of_it) for name in ("worst", "regret", "mean", "p99")]
        positions = sum(v.positions for v in all_of_it)
        numbers = " | ".join(f"{value:.1e}" if dtype == "float32" else f"{value:.3f}" for value in most)
        lines.append(f"| {shape} | {dtype} | {len(all_of_it)} | {positions} | {numbers} |")
    lines += ["", "| broken | shape | dtype | worst | regret | p99 |", "|---|---|---|---|---|---|"]
    for figure in sorted((f for f in figures if f.broken), key=lambda f: (f.case, f.shape, f.dtype)):
        v = figure.verdict
        lines.append(
            f"| {figure.case} | {figure.shape} | {figure.dtype} | {v.worst:.2f} | {v.regret:.2f} | {v.p99:.2f} |"
        )
    return "\n".join(lines) + "\n"
