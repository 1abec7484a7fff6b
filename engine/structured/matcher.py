"""Where one answer stands in its grammar, and when its thinking has to end."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from llguidance import LLMatcher

from engine.core.request import Drafter
from engine.structured.limits import plain

# Masks of an ordinary grammar take 0.02 ms in the mean, those of a schema of 400 properties with alternatives 1 ms.
ALLOWED_S = 1.0
ALLOWED_TOKEN_S = 2e-3


class Allowance:
    """Processor time that one grammar may take of the engine's thread, by all answers that keep to it: ALLOWED_S, of
    which each token gives ALLOWED_TOKEN_S back.

    worn: an answer has met a limit of llguidance's, at which the states that all of them share may be.
    """

    __slots__ = ("left", "worn")

    def __init__(self) -> None:
        self.left = ALLOWED_S
        self.worn = False

    def take(self, seconds: float) -> None:
        self.left = min(ALLOWED_S, self.left - seconds)

    @property
    def spent(self) -> bool:
        return self.left < 0

    @property
    def gone(self) -> bool:
        """Whether the next answer needs a grammar compiled afresh."""
        return self.spent or self.worn


class ThinkingBudget:
    """How much longer an answer may think.

    opening: takes answers that begin with thinking; None where the prompt has opened it. thinking: takes thinking up to
    its end. closing: the grammar of what comes once the budget is used up. left: tokens until then.
    """

    __slots__ = ("closing", "left", "opening", "thinking")

    def __init__(self, opening: LLMatcher | None, thinking: LLMatcher, closing: LLMatcher, left: int) -> None:
        self.opening = opening
        self.thinking = thinking
        self.closing = closing
        self.left = left

    def copy(self) -> ThinkingBudget:
        opening = None if self.opening is None else self.opening.deep_copy()
        return ThinkingBudget(opening, self.thinking.deep_copy(), self.closing.deep_copy(), self.left)

    @property
    def spent(self) -> bool:
        return self.opening is None and self.left <= 0

    def goes_on(self, token: int) -> bool:
        """Whether thinking may still come or go on after one more token."""
        if not self.thinking.try_consume_tokens([token]) or self.thinking.is_stopped():
            return False
        if self.opening is None:
            self.left -= 1
        elif self.opening.try_consume_tokens([token]) and self.opening.is_accepting():
            self.opening = None
        return True


class ForcedDrafter:
    """Proposes what a grammar forces, and what `other` does where it leaves a choice."""

    __slots__ = ("_matcher", "_other")

    def __init__(self, matcher: GrammarMatcher, other: Drafter) -> None:
        self._matcher = matcher
        self._other = other

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        """Up to `count` tokens that may follow."""
        others = self._other.propose(tokens, count)
        return self._matcher.forced()[:count] or others

    def close(self, given: Sequence[int]) -> None:
        self._other.close(given)


class GrammarMatcher:
    """One request's way through a grammar.

    allowance: what its grammar may take. inner: the grammar; None while anything may follow. free_until: tokens before
    which an end of sequence is drawn only where nothing else may be. budget: of its thinking, behind which the answer
    is free if that is all there is to it (`free`).
    """

    __slots__ = ("_eos_ids", "_error", "_free", "allowance", "budget", "count", "ended", "free_until", "inner")

    def __init__(
        self,
        inner: LLMatcher | None,
        eos_ids: frozenset[int],
        free_until: int,
        budget: ThinkingBudget | None = None,
        free: bool = False,
        allowance: Allowance | None = None,
    ) -> None:
        self.allowance = Allowance() if allowance is None else allowance
        self.inner = inner
        self.count = 0
        self.free_until = free_until
        self.budget = budget
        self.ended = inner is not None and not free and inner.is_stopped()
        self._free = free
        self._error: str | None = None
        self._eos_ids = eos_ids
        self._pass()

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def held(self) -> bool:
        """Whether a grammar says what may follow."""
        return self.inner is not None and not self.ended and self._error is None

    @property
    def looks_ahead(self) -> bool:
        """Behind drafts it follows the grammar, and no thinking that ends in the midst of them."""
        return self.inner is not None and self.budget is None and not self._free

    def forced(self) -> list[int]:
        """Tokens that alone may follow, as the tokenizer would write them."""
        if self.inner is None or not self.looks_ahead or self.ended or self._error is not None:
            return []
        return list(self.inner.compute_ff_tokens())

    def drafting(self, other: Drafter) -> Drafter:
        return ForcedDrafter(self, other)

    def copy(self, free_until: int) -> GrammarMatcher:
        """The same, at the beginning of another answer."""
        inner = None if self.inner is None else self.inner.deep_copy()
        budget = None if self.budget is None else self.budget.copy()
        return GrammarMatcher(inner, self._eos_ids, free_until, budget, self._free, self.allowance)

    def advance(self, token: int) -> None:
        if self.ended or self._error is not None:
            self.count += 1
            return
        began = time.thread_time()
        self.take(token)
        self.took(time.thread_time() - began - ALLOWED_TOKEN_S)

    def took(self, seconds: float) -> None:
        """So much of its allowance is used up; less than 0 gives it back. Fails when none is left."""
        self.allowance.take(seconds)
        if self.allowance.spent and not self.ended and self._error is None:
            self.fail("what may follow takes too long to tell; make the grammar simpler")

    def take(self, token: int) -> None:
        """One more token, on nobody's account."""
        goes_on = not self.ended and self._error is None
        if self.begin(token):
            assert self.inner is not None
            self.finish(self.inner.consume_token(token))
        if goes_on and self.budget is not None:
            if not self.budget.goes_on(token):
                self.budget = None
                self.inner = None if self._free else self.inner
            else:
                self._pass()

    def begin(self, token: int) -> bool:
        """One more token of an answer without a budget: whether `inner` has to consume it, behind which comes
        `finish`."""
        self.count += 1
        if self.ended or self._error is not None or self.inner is None:
            return False
        if token in self._eos_ids and self.inner.is_accepting():
            self.ended = True
            return False
        return True

    def finish(self, consumed: bool) -> None:
        """consumed: what `inner` said of the token."""
        inner = self.inner
        assert inner is not None
        if not consumed:
            self.at_limit(inner.get_error())
        elif self._free and inner.is_stopped():
            self.inner = None
        else:
            self.ended = inner.is_stopped()

    def _pass(self) -> None:
        """From what may come before or while the answer thinks to thinking, and from there to its end."""
        budget = self.budget
        if budget is None or budget.opening is not None:
            return
        if budget.spent:
            self.inner, self.budget, self.ended = budget.closing, None, False
        elif self.inner is None:
            self.inner = budget.thinking.deep_copy()

    def at_limit(self, why: str) -> None:
        """Fails: a limit of the grammar's size in use, or a token that it does not allow."""
        self.allowance.worn = True
        self.fail(plain(why) or "no token is left")

    def fail(self, why: str) -> None:
        """The answer cannot go on."""
        self._error = f"structured_outputs: the answer cannot go on within its grammar: {why}"
