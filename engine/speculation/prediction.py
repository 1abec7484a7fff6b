"""Drafts from what a request's sender predicts of the answer (OpenAI's predicted outputs): an edit of a long text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.speculation.drafters import Drafter

_SHIFT = 32


class Alignment:
    """Where an answer stands in what was predicted of it: behind the token that it gave as predicted. Once it gave
    another it stands nowhere, until it gives the one that was left out or two that follow each other further on.
    num_matched: predicted tokens that it gave."""

    __slots__ = ("_aligned", "_at", "_last", "_pairs", "_places", "_predicted", "num_matched")

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = array("i", predicted)
        self._at, self._last, self._aligned = 0, -1, True
        self.num_matched = 0
        tokens = np.array(predicted, np.int64)
        pairs = tokens[:-1] << _SHIFT | tokens[1:]
        order = np.argsort(pairs, kind="stable")
        self._pairs, self._places = pairs[order], order + 2  # of each pair, the place behind it

    def __len__(self) -> int:
        return len(self._predicted)

    def take(self, token: int) -> None:
        """The answer goes on with `token`."""
        pair, self._last = self._last << _SHIFT | token, token
        self._aligned = self._at < len(self._predicted) and self._predicted[self._at] == token
        if self._aligned:
            self._at += 1
            self.num_matched += 1
            return
        first, end = (int(np.searchsorted(self._pairs, bound)) for bound in (pair, pair + 1))
        places = self._places[first:end]
        found = int(np.searchsorted(places, self._at + 2))
        if found < len(places):
            self._at, self._aligned = int(places[found]), True
            self.num_matched += 2

    def following(self, count: int) -> Sequence[int]:
        """At most `count` tokens that follow as predicted."""
        return self._predicted[self._at : self._at + count] if self._aligned else ()


class PredictionDrafter:
    """Proposes what was predicted, and what `other` does where nothing of it is left."""

    __slots__ = ("_alignment", "_known", "_other")

    def __init__(self, predicted: Sequence[int], num_prompt: int, other: Drafter | None) -> None:
        self._alignment = Alignment(predicted)
        self._known = num_prompt  # tokens of the request, of which those behind the prompt are its answer
        self._other = other

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        """Up to `count` tokens that may follow."""
        for token in tokens[self._known :]:
            self._alignment.take(token)
        self._known = len(tokens)
        following = self._alignment.following(count)
        return following if following or self._other is None else self._other.propose(tokens, count)

    def close(self, given: Sequence[int]) -> None:
        if self._other is not None:
            self._other.close(given)
