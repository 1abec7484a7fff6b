"""Drafts by suffixes: what the model most often said where it had said the same before (Oliaro et al. 2024,
SuffixDecoding, arXiv:2411.04975). It knows what all requests of an engine gave, and the text of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.speculation.backoff import Backoff
from engine.speculation.ngram import Ngrams

# Tokens of the longest suffix that is looked up, and of the shortest that counts.
DEEPEST, LEAST = 24, 3
# Nodes and tokens of a tree; when it has them a new one is begun, and the one before it is let go: 15 MB each.
MAX_NODES, MAX_TOKENS = 1 << 17, 1 << 18
# Tokens that wait to be taken in, and how many a proposal takes in: each costs some microseconds.
MAX_WAITING, TAKEN = 1 << 15, 8
# A run of proposals ends where it is less likely than this, by how often each token followed.
MIN_LIKELY = 0.1
_END = -1  # behind each text
_SHIFT = 32


class SuffixTree:
    """Counts what followed each run of up to `deepest` tokens in the texts that it took in.

    A node is a run that stood in two places at least, or a leaf: one that stood in one, where the text says what
    follows. _counts: places where a node's run stood; _best: its child that stood in most of them, the later of equals;
    _places: where a leaf's text goes on, −1 for a node with children. _firsts: a node's first child, the only one of
    most; _children: the others, by node and token. 0: none.
    """

    def __init__(self, deepest: int = DEEPEST) -> None:
        self._deepest = deepest
        self._text = array("i")
        self._children: dict[int, int] = {}
        self._firsts = array("i", [0])
        self._tokens = array("i", [0])
        self._counts = array("i", [0])
        self._best = array("i", [0])
        self._places = array("i", [-1])
        self._started = 0  # of the text: suffixes from there on are to be taken in

    @property
    def nodes(self) -> int:
        return len(self._counts)

    def __len__(self) -> int:
        return len(self._text)

    @property
    def num_waiting(self) -> int:
        return len(self._text) - self._started

    @property
    def waiting(self) -> array[int]:
        """What was appended and is not taken in."""
        return self._text[self._started :]

    def begin(self, texts: array[int]) -> None:
        """Put down what waits in another tree."""
        self._text.extend(texts)

    def append(self, text: Sequence[int]) -> None:
        """Put down a text, to be taken in."""
        self._text.extend(text)
        self._text.append(_END)

    def take_in(self, count: int) -> None:
        """Take in the suffixes that begin at the next `count` tokens."""
        first, self._started = self._started, min(self._started + count, len(self._text))
        for start in range(first, self._started):
            self._insert(start)

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
        child = len(self._counts)
        if self._firsts[node]:
            self._children[node << _SHIFT | token] = child
        else:
            self._firsts[node] = child
        self._firsts.append(0)
        self._tokens.append(token)
        self._counts.append(count)
        self._best.append(0)
        self._places.append(place)
        best = self._best[node]
        if not best or count >= self._counts[best]:
            self._best[node] = child

    def _child(self, node: int, token: int) -> int:
        first = self._firsts[node]
        return first if first and self._tokens[first] == token else self._children.get(node << _SHIFT | token, 0)

    def following(self, tokens: Sequence[int], count: int, longer: int = 0) -> tuple[int, list[int]]:
        """How many of the last of `tokens` are known, more than `longer`, and up to `count` tokens that most likely
        follow; (0, []) where so many are not, or nothing followed."""
        for size in range(min(self._deepest - 1, len(tokens)), longer, -1):
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
        self._most = (most_nodes, most_tokens)
        self._latest, self._before = SuffixTree(), SuffixTree()

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
        if tree.nodes > self._most[0] or len(tree) > self._most[1]:
            self._latest, self._before = SuffixTree(), tree
            self._latest.begin(tree.waiting)
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
