"""How many tokens to draft in a step, of which requests: as many as raise the tokens a second, down to none.

A step of R entries and m drafts takes about plain(R) + m · extra(R) seconds, both measured. A draft behind j others of
its request is accepted with probability p^(j+1), where p is the request's acceptance rate: of the drafts that were
compared, the part that was accepted, the last ones counting most. The likeliest drafts of all requests are taken in
turn while they raise

    (R + sum of their probabilities) / (plain(R) + m · extra(R)).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import StepPlan

# What a draft adds to a step, as a part of the plain step's time an entry, before any was measured.
GUESSED_DRAFT_COST = 0.03
# Weight of the newest measured time, and of a request's past at each draft that is compared.
NEWEST_WEIGHT, PAST_WEIGHT = 0.1, 0.95
# A request begins as if so many of so many drafts had been accepted.
PRIOR_ACCEPTED, PRIOR_TRIED = 1.2, 2.0
MAX_ACCEPTANCE_RATE = 0.98
# After so many steps without a draft a request tries one. After so many steps one is made without drafts, to measure
# it; so are the first ones of a number of entries that was not measured yet, up to so many.
STEPS_BEFORE_TRIAL, STEPS_BEFORE_PLAIN, MAX_PLAIN_TRIES = 64, 256, 4


class Acceptance:
    """How many of one request's drafts were accepted."""

    __slots__ = ("_accepted", "_tried", "steps_without_drafts")

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTED
        self._tried = PRIOR_TRIED
        self.steps_without_drafts = 0

    @property
    def acceptance_rate(self) -> float:
        """The probability that a draft is accepted whose predecessors were."""
        return min(self._accepted / self._tried, MAX_ACCEPTANCE_RATE)

    def drafted(self, count: int, accepted: int) -> None:
        """Of `count` drafts in a step the first `accepted` were accepted."""
        tried = min(accepted + 1, count)
        past = PAST_WEIGHT**tried
        self._accepted = self._accepted * past + accepted
        self._tried = self._tried * past + tried


class DraftDepth:
    """Chooses for requests that may have up to `max_drafts` drafts each. Not thread-safe: the loop owns it."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by kind
        self._extra: dict[int, float] = {}  # seconds that a draft adds, by kind
        self._plain_tries: dict[int, int] = {}  # steps without drafts that were to be measured, by kind
        self._calls = 0

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so many seconds on the device."""
        if len(plan.rows) - plan.count.count(1) != len(plan.drafts):
            return  # beside a prompt
        kind = _kind(len(plan.rows))
        if not plan.drafts:
            self._plain[kind] = _mixed(self._plain.get(kind), seconds)
        elif kind in self._plain:
            drafted = sum(draft.count for draft in plan.drafts.values())
            extra = max(0.0, seconds - self._plain[kind]) / drafted
            self._extra[kind] = _mixed(self._extra.get(kind), extra)

    def draft_counts(self, entries: int, requests: Sequence[Acceptance]) -> list[int]:
        """How many drafts each of the requests gets in a step of `entries` entries."""
        kind = _kind(entries)
        self._calls += 1
        waits = self._plain_tries.get(kind, 0)
        if self._calls % STEPS_BEFORE_PLAIN == 0 or (kind not in self._plain and waits < MAX_PLAIN_TRIES):
            self._plain_tries[kind] = waits + 1
            return [0] * len(requests)
        # Where no time is known a plain step takes 1.
        seconds = self._plain.get(kind, 1.0)
        extra = self._extra.get(kind, GUESSED_DRAFT_COST * seconds / entries)
        gains = sorted(
            (
                (of.acceptance_rate**depth, i)
                for i, of in enumerate(requests)
                for depth in range(1, self.max_drafts + 1)
            ),
            reverse=True,
        )
        counts, tokens = [0] * len(requests), float(entries)
        for gain, i in gains:
            # It raises the rate where it gives more of a token a second than all before it.
            if gain * seconds <= tokens * extra:
                break
            tokens, seconds = tokens + gain, seconds + extra
            counts[i] += 1
        for i, of in enumerate(requests):
            of.steps_without_drafts += 1
            if of.steps_without_drafts > STEPS_BEFORE_TRIAL:
                counts[i] = max(counts[i], 1)
            if counts[i]:
                of.steps_without_drafts = 0
        return counts


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else before + NEWEST_WEIGHT * (new - before)


def _kind(entries: int) -> int:
    """Steps of one kind have about as many entries: the same number up to 8, then the same number of eights."""
    return entries if entries <= 8 else 7 + -(-entries // 8)
