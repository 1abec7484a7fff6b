"""How many tokens to draft in a step, of which requests: as many as raise the tokens a second, down to none.

A step of R entries and m drafts takes about plain(R) + m · extra(R) seconds, both measured. A draft behind j others of
its request is accepted with probability p^(j+1), where p is the request's acceptance rate: of the drafts that were
compared, the part that was accepted, the last ones counting most. The likeliest drafts of all requests are taken in
turn while they raise

    (R + sum of their probabilities) / (plain(R) + m · extra(R)).

A new request begins with the rate of those before it. What drafts on the device computes every token of the model's
steps, beside prompts too, which costs time as well. When accepted drafts have not made up for that over a number of
steps it rests: it computes nothing, and nobody drafts, for longer each time, or until there are far fewer entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.plan import StepPlan

# What a draft adds to a step, as a part of the plain step's time an entry, before any was measured.
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
# it; so are the first ones of a number of entries that was not measured yet, up to so many.
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
        self.max_drafts = max_drafts
        self.overall = Acceptance(past_weight=OVERALL_PAST_WEIGHT)
        self._ready = ready
        self._rests = rests
        self._stretch = Stretch()
        self._rest, self._rest_left, self._rest_entries = FIRST_REST, 0, 0
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by kind
        self._extra: dict[int, float] = {}  # seconds that a draft adds, by kind
        self._plain_tries: dict[int, int] = {}  # steps without drafts that were to be measured, by kind
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
            drafted = sum(draft.count for draft in plan.drafts.values())
            extra = max(0.0, seconds - self._plain[kind]) / drafted
            self._extra[kind] = _mixed(self._extra.get(kind), extra)

    def draft_counts(self, entries: int, requests: Sequence[Acceptance]) -> list[int]:
        """How many drafts each of the requests gets in a step of `entries` entries."""
        if self._rest_left:
            return [0] * len(requests)
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
        plain = tokens / seconds  # a second
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
        drafting = len(counts) - counts.count(0)
        if drafting and not self._ready(entries - drafting, drafting, max(counts)):
            return self._same_for_all(entries, requests, max(counts), extra, plain)
        return counts

    def _same_for_all(
        self, entries: int, requests: Sequence[Acceptance], depth: int, extra: float, plain: float
    ) -> list[int]:
        """The same depth for all requests, where such a step is ready and gives more tokens a second; else none."""
        rates = [of.acceptance_rate for of in requests]
        tokens = entries + sum(rate**j for rate in rates for j in range(1, depth + 1))
        seconds = entries / plain + depth * len(requests) * extra
        if tokens <= seconds * plain or not self._ready(entries - len(requests), len(requests), depth):
            return [0] * len(requests)
        return [depth] * len(requests)

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


def _kind(entries: int) -> int:
    """Steps of one kind have about as many entries: the same number up to 8, then the same number of eights."""
    return entries if entries <= 8 else 7 + -(-entries // 8)
