"""Where one answer stands in its grammar."""

from __future__ import annotations

from llguidance import LLMatcher


class GrammarMatcher:
    """One request's way through a grammar.

    free_until: tokens before which an end of sequence is drawn only where nothing else may be.
    """

    __slots__ = ("_eos_ids", "_error", "count", "ended", "free_until", "inner")

    def __init__(self, inner: LLMatcher, eos_ids: frozenset[int], free_until: int) -> None:
        self.inner = inner
        self.count = 0
        self.free_until = free_until
        self.ended = inner.is_stopped()
        self._error: str | None = None
        self._eos_ids = eos_ids

    @property
    def error(self) -> str | None:
        return self._error

    def advance(self, token: int) -> None:
        self.count += 1
        if self.ended or self._error is not None:
            return
        if token in self._eos_ids and self.inner.is_accepting():
            self.ended = True
        elif not self.inner.consume_token(token):
            self.fail(self.inner.get_error())
        else:
            self.ended = self.inner.is_stopped()

    def fail(self, why: str) -> None:
        """The answer cannot go on: a limit of the grammar's size in use, or a token that it does not allow."""
        first = why.strip().splitlines()[0] if why.strip() else "no token is left"
        self._error = f"structured_outputs: the answer cannot go on within its grammar: {first}"
