"""Drafts by suffixes: what the model most often said where it had said the same before (Oliaro et al. 2024,
SuffixDecoding, arXiv:2411.04975). It knows what all requests of an engine gave, and the text of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from engine.speculation.backoff import Backoff
from engine.speculation.ngram import Ngrams

# Tokens of the longest suffix that is looked up, and of the shortest that counts.
DEEPEST, LEAST = 24, 3
# Nodes and tokens of a tree, 5.4 MB; when it has them the one before it is cleared and takes its place.
MAX_NODES, MAX_TOKENS = 1 << 17, 1 << 18
# Tokens that wait to be taken in, and how many a proposal takes in: each costs some microseconds.
MAX_WAITING, TAKEN = 1 << 15, 8
# A run of proposals ends where it is less likely than this, by how often each token followed.
MIN_LIKELY = 0.1
_END = -1  # behind each text
_NODE_FACTOR, _TOKEN_FACTOR = 0x9E3779B1, 0x85EBCA6B  # odd, so that each bit of a node and a token counts


class SuffixTree:
    """Counts what followed each run of up to `deepest` tokens in the texts that it took in.

    A node is a run that stood in two places at least, or a leaf: one that stood in one, where the text says what
    follows. _counts: places where a node's run stood; _best: its child that stood in most of them, the later of equals;
    _places: where a leaf's text goes on, −1 for a node with children. _firsts: a node's first child, the only one of
    most; _others: the rest, a hash table with linear probing. 0: none. All of it has its whole size from the start, so
    that an engine does not grow while it serves.
    """

    def __init__(self, deepest: int = DEEPEST, max_nodes: int = MAX_NODES, max_tokens: int = MAX_TOKENS) -> None:
        self._deepest = deepest
        self._max_nodes = max_nodes
        self._text = array("i", [_END]) * (max_tokens + MAX_WAITING)
        self._size = 0  # of the text: what it has room for stands behind
        none = array("i", [0]) * (max_nodes + deepest + 2)
        self._parents, self._tokens, self._firsts, self._counts, self._best, self._places = (none[:] for _ in range(6))
        self._places[0] = -1
        self._nodes = 1
        self._others = array("i", [0]) * (1 << max_nodes.bit_length())
        self._last_slot = len(self._others) - 1
        self._started = 0  # of the text: suffixes from there on are to be taken in

    @property
    def nodes(self) -> int:
        return self._nodes

    @property
    def full(self) -> bool:
        """Whether it takes in no more."""
        return self._nodes >= self._max_nodes

    def __len__(self) -> int:
        return self._size

    @property
    def num_waiting(self) -> int:
        return self._size - self._started

    @property
    def waiting(self) -> array[int]:
        """What was appended and is not taken in."""
        return self._text[self._started : self._size]

    def clear(self) -> None:
        """Forget all texts."""
        for held in (self._firsts, self._counts, self._best, self._others):
            np.frombuffer(held, np.int32).fill(0)
        self._nodes, self._size, self._started = 1, 0, 0

    def extend(self, texts: array[int]) -> None:
        """Put down texts, to be taken in, each with its end behind it."""
        end = self._size + len(texts)
        self._text[self._size : end] = texts
        self._size = end

    def append(self, text: Sequence[int]) -> None:
        """Put down a text, to be taken in."""
        self.extend(array("i", (*text, _END)))

    def take_in(self, count: int) -> None:
        """Take in the suffixes that begin at the next `count` tokens, or fewer where the tree is full then."""
        end = min(self._started + count, self._size)
        while self._started < end and not self.full:
            self._insert(self._started)
            self._started += 1

    def _insert(self, start: int) -> None:
        """The suffix of the text that begins at `start`, as far as it is known already and one token further."""
        text, counts, places = self._text, self._counts, self._places
        node = 0
        for at in range(start, start + self._deepest):
            token = text[at]
            if token == _END:
                return
            child = self._child(node, token)
            if not child:
                self._add(node, token, at + 1, 1)
                return
            counts[child] += 1
            if counts[child] >= counts[self._best[node]] or not self._best[node]:
                self._best[node] = child
            node = child
            place = places[node]
            if place < 0:
                continue
            if at + 1 == start + self._deepest:
                places[node] = at + 1
            else:
                places[node] = -1
                if text[place] != _END:
                    self._add(node, text[place], place + 1, counts[node] - 1)

    def _add(self, node: int, token: int, place: int, count: int) -> None:
        child, self._nodes = self._nodes, self._nodes + 1
        if self._firsts[node]:
            self._others[self._slot(node, token)] = child
        else:
            self._firsts[node] = child
        self._parents[child], self._tokens[child] = node, token
        self._counts[child], self._places[child] = count, place
        best = self._best[node]
        if not best or count >= self._counts[best]:
            self._best[node] = child

    def _child(self, node: int, token: int) -> int:
        child = self._firsts[node]
        return self._others[self._slot(node, token)] if child and self._tokens[child] != token else child

    def _slot(self, node: int, token: int) -> int:
        """Of _others: where this child of a node stands, or the first one free for it."""
        others, parents, tokens = self._others, self._parents, self._tokens
        slot = (node * _NODE_FACTOR + token * _TOKEN_FACTOR >> 14) & self._last_slot
        while (child := others[slot]) and (tokens[child] != token or parents[child] != node):
            slot = (slot + 1) & self._last_slot
        return slot

    def following(self, tokens: Sequence[int], count: int, longer: int = 0) -> tuple[int, list[int]]:
        """How many of the last of `tokens` are known, more than `longer`, and up to `count` tokens that most likely
        follow; (0, []) where so many are not, or nothing followed."""
        # Where a run is known its end is too, but for the end of a text that is being taken in.
        known, unknown = longer, min(self._deepest, len(tokens) + 1)
        while known + 1 < unknown:
            size = (known + unknown) // 2
            if self._find(tokens[len(tokens) - size :])[0]:
                known = size
            else:
                unknown = size
        for size in range(known, longer, -1):
            node, place = self._find(tokens[len(tokens) - size :])
            if node:
                run = self._run(node, place, count)
                if run:
                    return size, run
        return 0, []

    def _find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The node of a run, and in a leaf's text the place behind it; (0, -1) where it is not known."""
        node = 0
        for i, token in enumerate(tokens):
            child = self._child(node, token)
            if not child:
                return 0, -1
            node, place = child, self._places[child]
            if place >= 0:
                end = place + len(tokens) - i - 1
                return (node, end) if self._text[place:end] == tokens[i + 1 :] else (0, -1)
        return node, -1

    def _run(self, node: int, place: int, count: int) -> list[int]:
        run: list[int] = []
        likely = 1.0
        while place < 0 and len(run) < count:
            best = self._best[node]
            if not best:
                return run
            likely *= self._counts[best] / self._counts[node]
            if likely < MIN_LIKELY:
                return run
            run.append(self._tokens[best])
            node, place = best, self._places[best]
        while len(run) < count and self._text[place] != _END:
            run.append(self._text[place])
            place += 1
        return run


class Outputs:
    """What the requests of an engine gave, in bounded memory: a tree of the latest, and the one before it."""

    def __init__(self, most_nodes: int = MAX_NODES, most_tokens: int = MAX_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._latest, self._before = (SuffixTree(max_nodes=most_nodes, max_tokens=most_tokens) for _ in range(2))

    @property
    def nodes(self) -> int:
        return self._latest.nodes + self._before.nodes

    def add(self, text: Sequence[int]) -> None:
        """A text that is to be known. Where too much waits to be taken in it is left out."""
        if self._latest.num_waiting + len(text) <= MAX_WAITING:
            self._latest.append(text)

    def take_in(self, count: int) -> None:
        """Take in some of what was added."""
        tree = self._latest
        if tree.full or len(tree) > self._most_tokens:
            self._latest, self._before = self._before, tree
            self._latest.clear()
            self._latest.extend(tree.waiting)
        self._latest.take_in(count)

    def following(self, tokens: array[int], count: int, longer: int) -> list[int]:
        """Up to `count` tokens behind the longest known run of the last tokens, of more than `longer`."""
        last = tokens[-DEEPEST:]
        size, run = self._latest.following(last, count, longer)
        _, older = self._before.following(last, count, max(longer, size))
        return older or run


class SuffixDrafter:
    """Proposes for one request: what followed the longest run of its last tokens, in what requests gave or in its own
    text."""

    __slots__ = ("_backoff", "_ngrams", "_outputs")

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._ngrams = Ngrams()
        self._backoff = Backoff()

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        """Up to `count` tokens that may follow."""
        self._outputs.take_in(TAKEN)
        if self._backoff.rests(tokens):
            return ()
        size, own = self._ngrams.match(tokens, count)
        following = self._outputs.following(tokens, count, max(size, LEAST - 1)) or own
        self._backoff.proposed(tokens, following)
        return following

    def close(self, given: Sequence[int]) -> None:
        """The request is over, and `given` is what the model gave."""
        self._outputs.add(given)
