"""How many tokens to draft: as many as make the most tokens a second, by what drafts of each request came to and what
steps took. Down to none: a draft that does not stand costs time.

A step of R entries and m drafts takes about plain(R) + m · extra(R) seconds, both measured. A draft behind j others of
its request stands with probability p^(j+1), where p is the part of those of the request's drafts that were reached and
stood, the last ones counting most. The likeliest drafts of all requests are taken in turn while they raise

    (R + sum of their probabilities) / (plain(R) + m · extra(R)).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import StepPlan

# What a draft adds to a step as a part of the plain one, over its entries, before any was measured.
GUESSED = 0.03
# Weight of the newest measurement, and of a request's past at its newest draft.
NEWEST, PAST = 0.1, 0.95
# A request begins as if so many of so many drafts had stood.
STOOD, TRIED = 1.2, 2.0
LIKELIEST = 0.98
# Steps without a draft after which a request tries one; steps after which one is made without drafts, and how many are
# while none of that many entries was measured.
REST, DRAFTED, AWAITED = 64, 256, 4


class Acceptance:
    """What one request's drafts came to."""

    __slots__ = ("_stood", "_tried", "rested")

    def __init__(self) -> None:
        self._stood = STOOD
        self._tried = TRIED
        self.rested = 0

    @property
    def likely(self) -> float:
        """The probability that a draft behind ones that stood stands."""
        return min(self._stood / self._tried, LIKELIEST)

    def drafted(self, count: int, stood: int) -> None:
        """Of `count` drafts in a step the first `stood` stood."""
        tried = min(stood + 1, count)
        past = PAST**tried
        self._stood = self._stood * past + stood
        self._tried = self._tried * past + tried


class Depth:
    """Chooses for requests that may have up to `most` drafts each. Not thread-safe: the loop owns it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._plain: dict[int, float] = {}
        self._extra: dict[int, float] = {}
        self._awaited: dict[int, int] = {}  # steps without drafts that were to be measured
        self._calls = 0

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        if len(plan.rows) - plan.count.count(1) != len(plan.drafts):
            return  # beside a prompt
        kind = _kind(len(plan.rows))
        if not plan.drafts:
            self._plain[kind] = _mixed(self._plain.get(kind), seconds)
        elif kind in self._plain:
            drafted = sum(draft.count for draft in plan.drafts.values())
            extra = max(0.0, seconds - self._plain[kind]) / drafted
            self._extra[kind] = _mixed(self._extra.get(kind), extra)

    def counts(self, entries: int, requests: Sequence[Acceptance]) -> list[int]:
        """Drafts of each of the requests, in a step of so many entries."""
        kind = _kind(entries)
        self._calls += 1
        waits = self._awaited.get(kind, 0)
        if self._calls % DRAFTED == 0 or (kind not in self._plain and waits < AWAITED):
            self._awaited[kind] = waits + 1
            return [0] * len(requests)
        # Where no time is known a plain step takes 1.
        seconds = self._plain.get(kind, 1.0)
        extra = self._extra.get(kind, GUESSED * seconds / entries)
        gains = sorted(
            ((of.likely**depth, i) for i, of in enumerate(requests) for depth in range(1, self.most + 1)), reverse=True
        )
        counts, tokens = [0] * len(requests), float(entries)
        for gain, i in gains:
            # It raises the rate where it gives more of a token a second than all before it.
            if gain * seconds <= tokens * extra:
                break
            tokens, seconds = tokens + gain, seconds + extra
            counts[i] += 1
        for i, of in enumerate(requests):
            of.rested += 1
            if of.rested > REST:
                counts[i] = max(counts[i], 1)
            if counts[i]:
                of.rested = 0
        return counts


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else before + NEWEST * (new - before)


def _kind(entries: int) -> int:
    return entries if entries <= 8 else 7 + -(-entries // 8)
