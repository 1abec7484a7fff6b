"""How many tokens to draft in a step, of which requests: as many as raise the tokens a second, down to none.

A step in which n of R entries draft up to d tokens each takes about

    plain(R) + extra(R, d) · (1 + n / R) / 2

seconds: each depth is a pass of what drafts, and each draft one more token of the step. Both are measured; a depth that
was not costs as one that was, in proportion. Steps are padded, so that a draft within the depth of a step is free:
depths are those of padded steps (`DRAFT_COUNTS`), and who drafts at all drafts so deep.

A draft behind j others of its request is accepted with probability p^(j+1), where p is the request's acceptance rate:
of the drafts that were compared, the part that was accepted, the last ones counting most. Of all depths and all n, with
the requests of the highest rates, the step with the most expected tokens a second is taken:

    (R + sum of the drafts' probabilities) / seconds.

A new request begins with the rate of those before it. What drafts on the device computes every token of the model's
steps, beside prompts too, which costs time as well. When accepted drafts have not made up for that over a number of
steps it rests: it computes nothing, and nobody drafts, for longer each time, or until there are far fewer entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.plan import StepPlan, draft_depths

# What each draft of all entries adds to a step, as a part of the plain step's time, before any was measured.
GUESSED_DRAFT_COST = 0.03
# Weight of the newest measured time, and of a request's past at each draft that is compared.
NEWEST_WEIGHT, PAST_WEIGHT = 0.1, 0.95
# The first request begins with a rate of so many accepted of so many drafts; so many count what others came to.
PRIOR_ACCEPTED, PRIOR_TRIED = 1.2, 2.0
MAX_ACCEPTANCE_RATE = 0.98
# Weight of what all requests came to, at each draft that is compared.
OVERALL_PAST_WEIGHT = 0.995
# A time that is so many times less than those before replaces them: the first step of a kind is often slow. One counts
# as at most so many times more, for a step may have had to wait for the host.
MUCH_LESS, MUCH_MORE = 0.75, 3.0
# What drafts on the device is worth its own time where drafts save so much of a stretch of steps.
MIN_GAIN = 0.05
# Steps of a stretch, of the first rest and of the longest, and the part of the entries at a rest's beginning that ends
# it.
STRETCH, FIRST_REST, MAX_REST, FAR_FEWER = 64, 256, 4096, 0.5
# After so many steps without a draft a request tries one. After so many steps one is made without drafts, to measure
# it; so are the first ones while no step without drafts was measured, up to so many.
STEPS_BEFORE_TRIAL, STEPS_BEFORE_PLAIN, MAX_PLAIN_TRIES = 64, 256, 4


class Acceptance:
    """How many of one request's drafts were accepted, in all `num_accepted`. overall: of all requests, which goes on
    with this one."""

    __slots__ = ("_accepted", "_overall", "_past_weight", "_tried", "num_accepted", "steps_without_drafts")

    def __init__(self, overall: Acceptance | None = None, past_weight: float = PAST_WEIGHT) -> None:
        rate = PRIOR_ACCEPTED / PRIOR_TRIED if overall is None else overall.acceptance_rate
        self._accepted, self._tried = rate * PRIOR_TRIED, PRIOR_TRIED
        self._overall, self._past_weight = overall, past_weight
        self.num_accepted = self.steps_without_drafts = 0

    @property
    def acceptance_rate(self) -> float:
        """The probability that a draft is accepted whose predecessors were."""
        return min(self._accepted / self._tried, MAX_ACCEPTANCE_RATE)

    def drafted(self, count: int, accepted: int) -> None:
        """Of `count` drafts in a step the first `accepted` were accepted."""
        tried = min(accepted + 1, count)
        self.num_accepted += accepted
        past = self._past_weight**tried
        self._accepted = self._accepted * past + accepted
        self._tried = self._tried * past + tried
        if self._overall is not None:
            self._overall.drafted(count, accepted)


@dataclass(slots=True)
class Stretch:
    """Steps that what drafts on the device follows: how many, the seconds that they took and that drafts added, the
    seconds of a token and the entries in the last one with drafts, and all drafts accepted before them."""

    steps: int = 0
    seconds: float = 0.0
    extra: float = 0.0
    token_seconds: float = 0.0
    entries: int = 0
    accepted: int = 0


class DraftDepth:
    """Chooses for requests that may have up to `max_drafts` drafts each. Not thread-safe: the loop owns it.

    ready: as `Runner.drafts_ready`; steps that are not are left alone. rests: what drafts is on the device.
    """

    def __init__(
        self, max_drafts: int, ready: Callable[[int, int, int], bool] = lambda *_: True, rests: bool = False
    ) -> None:
        self.overall = Acceptance(past_weight=OVERALL_PAST_WEIGHT)
        self._depths = draft_depths(max_drafts)
        self._ready = ready
        self._rests = rests
        self._stretch = Stretch()
        self._rest, self._rest_left, self._rest_entries = FIRST_REST, 0, 0
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by kind
        self._extra: dict[int, dict[int, float]] = {}  # seconds that drafts of all entries add, by kind and depth
        self._plain_tries = 0  # steps without drafts that were to be measured
        self._calls = 0

    def follows(self, entries: int) -> bool:
        """Whether a step of so many entries is computed by what drafts as well: asked once a step."""
        if self._rest_left:
            self._rest_left = 0 if entries <= FAR_FEWER * self._rest_entries else self._rest_left - 1
        return not self._rest_left

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so many seconds on the device."""
        kind = _kind(len(plan.rows))
        if self._rests and plan.follows:
            self._observe_gain(plan, seconds, self._plain.get(kind, seconds))
        if len(plan.rows) - plan.count.count(1) != len(plan.drafts):
            return  # beside a prompt
        if not plan.drafts:
            self._plain[kind] = _mixed(self._plain.get(kind), seconds)
        elif kind in self._plain:
            deepest = max(draft.count for draft in plan.drafts.values())
            depth = next(depth for depth in self._depths if depth >= deepest)
            extra = max(0.0, seconds - self._plain[kind]) / _share(len(plan.drafts), len(plan.rows))
            known = self._extra.setdefault(kind, {})
            known[depth] = _mixed(known.get(depth), extra)

    def draft_counts(self, entries: int, requests: Sequence[Acceptance]) -> list[int]:
        """How many drafts each of the requests gets in a step of `entries` entries."""
        counts = [0] * len(requests)
        if self._rest_left:
            return counts
        self._calls += 1
        if self._calls % STEPS_BEFORE_PLAIN == 0:
            return counts
        plain = self._plain_seconds(entries)
        if plain is None and self._plain_tries < MAX_PLAIN_TRIES:
            self._plain_tries += 1
            return counts
        by_rate = sorted(range(len(requests)), key=lambda i: requests[i].acceptance_rate, reverse=True)
        rates = [requests[i].acceptance_rate for i in by_rate]
        drafting, depth = self._best(entries, rates, 1.0 if plain is None else plain)
        for i in by_rate[:drafting]:
            counts[i] = depth
        for i, of in enumerate(requests):
            of.steps_without_drafts += 1
            if of.steps_without_drafts > STEPS_BEFORE_TRIAL:
                counts[i] = max(counts[i], 1)
            if counts[i]:
                of.steps_without_drafts = 0
        drafting = len(counts) - counts.count(0)
        if drafting and not self._ready(entries - drafting, drafting, max(counts)):
            return [0] * len(requests)
        return counts

    def _best(self, entries: int, rates: Sequence[float], plain: float) -> tuple[int, int]:
        """How many of the requests draft, those of the highest rates, and how deep. Of each depth the step with the
        most tokens a second is compared, and that in which all draft; those that are not ready are left out.

        rates: falling. plain: seconds of the step without drafts."""
        steps = [(entries / plain, 0, 0)]
        for depth in self._depths:
            full, tokens = self._extra_seconds(entries, depth, plain), float(entries)
            gains = []
            for drafting, rate in enumerate(rates, 1):
                tokens += rate * (1 - rate**depth) / (1 - rate)
                gains.append((tokens / (plain + full * _share(drafting, entries)), drafting, depth))
            steps += dict.fromkeys((max(gains), gains[-1])) if gains else ()
        return next(
            (drafting, depth)
            for _, drafting, depth in sorted(steps, reverse=True)
            if not drafting or self._ready(entries - drafting, drafting, depth)
        )

    def _plain_seconds(self, entries: int) -> float | None:
        """Of a step without drafts: as measured, or as the nearest number of entries took."""
        kind = _kind(entries)
        if kind in self._plain or not self._plain:
            return self._plain.get(kind)
        return self._plain[min(self._plain, key=lambda other: abs(other - kind))]

    def _extra_seconds(self, entries: int, depth: int, plain: float) -> float:
        """What drafts of all entries add to a step: as measured, or in proportion to the nearest depth that was; before
        any was measured, by a guess."""
        known = self._extra.get(_kind(entries), {})
        if not known:
            return depth * GUESSED_DRAFT_COST * plain
        nearest = min(known, key=lambda other: abs(other - depth))
        return known[nearest] * depth / nearest

    def _observe_gain(self, plan: StepPlan, seconds: float, plain: float) -> None:
        """Behind a stretch that saved too little, rest. plain: seconds of such a step without drafts."""
        stretch = self._stretch
        stretch.steps += 1
        stretch.seconds += seconds
        if plan.drafts:
            stretch.extra += max(0.0, seconds - plain)
            stretch.token_seconds, stretch.entries = plain / len(plan.rows), len(plan.rows)
        if stretch.steps < STRETCH:
            return
        accepted = self.overall.num_accepted - stretch.accepted
        saved = accepted * stretch.token_seconds - stretch.extra
        if saved >= MIN_GAIN * stretch.seconds:
            self._rest = FIRST_REST
        else:
            self._rest_left, self._rest_entries = self._rest, stretch.entries or len(plan.rows)
            self._rest = min(2 * self._rest, MAX_REST)
        self._stretch = Stretch(accepted=self.overall.num_accepted)


def _mixed(before: float | None, new: float) -> float:
    if before is None or new < MUCH_LESS * before:
        return new
    return before + NEWEST_WEIGHT * ((min(new, MUCH_MORE * before) if before else new) - before)


def _share(drafting: int, entries: int) -> float:
    """What of the seconds that drafts of all entries add is there when so many draft."""
    return (1 + drafting / entries) / 2


def _kind(entries: int) -> int:
    """Steps of one kind have about as many entries: the same number up to 8, then the same number of eights."""
    return entries if entries <= 8 else 7 + -(-entries // 8)
