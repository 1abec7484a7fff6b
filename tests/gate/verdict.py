"""How far an engine's log-probabilities are from the oracle's, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.types import TokenLogprobs
from tests.gate.oracle import TOP, Sequence

NUM_LOGPROBS = 20
# The limits of the gate: `worst` in float32, the others in bfloat16.
WORST, REGRET, MEAN, P99 = 1e-4, 0.20, 0.06, 0.20


@dataclass(frozen=True)
class Verdict:
    """Over `positions`: largest |Δlogprob| of every token the engine reported; regret (what the engine's best token
    lacks to the oracle's best, by the oracle); mean and 99th percentile of |Δlogprob| on the oracle's TOP tokens.
    furthest: the sequence of the largest regret, of equals that of the largest difference."""

    positions: int
    worst: float
    regret: float
    mean: float
    p99: float
    furthest: int

    def passes(self, dtype: str) -> bool:
        """The limits of the gate. NaN fails."""
        if dtype == "float32":
            return self.worst <= WORST
        return self.regret <= REGRET and self.mean <= MEAN and self.p99 <= P99

    def __str__(self) -> str:
        return (
            f"{self.positions} positions: worst {self.worst:.2e}, regret {self.regret:.3f}, "
            f"mean {self.mean:.4f}, p99 {self.p99:.4f}, furthest in sequence {self.furthest}"
        )


def judge(sequences: Seq[Sequence], played: Seq[Seq[TokenLogprobs]], dtype: str) -> Verdict:
    """played[i][j] is what the engine said at forced position j of sequence i: the drawn token, then its top ones."""
    worst, regret, top, of = [], [], [], []
    for i, (sequence, entries) in enumerate(zip(sequences, played, strict=True)):
        for truth, entry in zip(sequence.logprobs[dtype], entries, strict=True):
            ids, values = np.array(entry.ids), np.array(entry.logprobs)
            worst.append(np.abs(values - truth[ids]).max())
            best = ids[1:][np.argmax(values[1:])]
            regret.append(truth.max() - truth[best])
            of.append(i)
            said = dict(zip(entry.ids, entry.logprobs, strict=True))
            # A token of the oracle's best that the engine does not even rank among its 20 is infinitely far.
            top += [abs(said.get(int(token), -np.inf) - truth[token]) for token in np.argsort(-truth)[:TOP]]
    return Verdict(
        positions=len(regret),
        worst=float(np.max(worst)),
        regret=float(np.max(regret)),
        mean=float(np.mean(top)),
        p99=float(np.quantile(top, 0.99, method="higher")),
        furthest=max(zip(regret, worst, of, strict=True))[2],
    )
