"""Drafts by n-grams: what followed the last place where a request's last tokens stood before (Saxena 2023, prompt
lookup decoding). It reads the prompt and what the request gave, so it draws on quotes, edits and repeated forms."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from engine.speculation.backoff import Backoff

# Tokens of an n-gram, the longest first: a longer one says more of what follows.
SIZES = (4, 2)
# Entries of a table: at least two a token that is there at the first call, within these bounds. Of n-grams that share
# an entry the later one stays.
MIN_ENTRIES, MAX_ENTRIES = 1 << 10, 1 << 16
# From so many new tokens on they are indexed as arrays: 128,000 take milliseconds.
MANY = 64
_FACTOR, _BITS = 1_000_003, 0x7FFFFFFF


class NgramDrafter:
    """Proposes, while it is right (`Backoff`), what followed before."""

    __slots__ = ("_backoff", "_ngrams")

    def __init__(self) -> None:
        self._ngrams = Ngrams()
        self._backoff = Backoff()

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        """`count` tokens that may follow, or none."""
        if self._backoff.rests(tokens):
            return ()
        following = self._ngrams.following(tokens, count)
        self._backoff.proposed(tokens, following)
        return following

    def close(self, given: Sequence[int]) -> None:
        """Nothing is kept of a request that is over."""


class Ngrams:
    """Where the n-grams of one text ended last: a table a size, of at most 256 KiB."""

    __slots__ = ("_indexed", "_tables")

    def __init__(self) -> None:
        self._indexed = 0
        self._tables: list[array[int]] = []

    @property
    def entries(self) -> int:
        """Of all tables."""
        return sum(map(len, self._tables))

    def following(self, tokens: array[int], count: int) -> Sequence[int]:
        """`count` tokens that followed the last ones before, or none. `tokens` is the text of the call before and more.
        Where it repeats itself they go round."""
        return self.match(tokens, count)[1]

    def match(self, tokens: array[int], count: int) -> tuple[int, Sequence[int]]:
        """The same, behind how many tokens they followed: 0 where none did."""
        self._index(tokens)
        length = len(tokens)
        for size, table in zip(SIZES, self._tables, strict=True):
            if length <= size:
                continue
            last = tokens[length - size :]
            end = table[_place(last, len(table) - 1)]
            if end and tokens[end - size : end] == last:
                following = tokens[end : end + count]
                while len(following) < count:
                    following += following[: count - len(following)]
                return size, following
        return 0, ()

    def _index(self, tokens: array[int]) -> None:
        """Take in the n-grams that a token follows."""
        length = len(tokens)
        if not self._tables:
            entries = min(max(MIN_ENTRIES, 1 << (2 * length - 1).bit_length()), MAX_ENTRIES)
            self._tables = [array("i", bytes(4 * entries)) for _ in SIZES]
        first, self._indexed = self._indexed, length
        for size, table in zip(SIZES, self._tables, strict=True):
            begin = max(first, size)
            if length - begin > MANY:
                _index_many(tokens, size, begin, table)
                continue
            for end in range(begin, length):
                table[_place(tokens[end - size : end], len(table) - 1)] = end


def _place(ngram: Sequence[int], mask: int) -> int:
    x = 0
    for token in ngram:
        x = (x * _FACTOR + token) & _BITS
    return (x ^ x >> 15) & mask


def _index_many(tokens: array[int], size: int, begin: int, table: array[int]) -> None:
    """The n-grams that end at `begin` and behind it, as `_place` has them."""
    held = np.frombuffer(tokens, np.int32)[begin - size :].astype(np.int64)
    count = len(held) - size
    x = np.zeros(count, np.int64)
    for i in range(size):
        x = (x * _FACTOR + held[i : i + count]) & _BITS
    places = (x ^ x >> 15) & (len(table) - 1)
    # Of equal places the last is to stay: numpy leaves open which of them does.
    _, latest = np.unique(places[::-1], return_index=True)
    kept = count - 1 - latest
    np.frombuffer(table, np.int32)[places[kept]] = begin + kept
