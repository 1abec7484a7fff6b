"""The choice of beams, step by step: scores in, beams out. No engine here.

The algorithm and its order of ties are those of transformers' `generate(num_beams=…, do_sample=False)`: of the best
continuations, ends of sequence among the first `width` become answers, the others go on; an answer's score is the sum
of its log-probabilities over its length to the power of the length penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens behind the prompt, their log-probabilities (the token's own first, then the best ones at its place) and
    the sum of their own."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cumulative: float = 0.0

    def followed_by(self, token: int, entry: TokenLogprobs) -> Beam:
        at = entry.ids.index(token, 1)
        own = TokenLogprobs(
            [token, *entry.ids[1:]],
            [entry.logprobs[at], *entry.logprobs[1:]],
            [entry.ranks[at], *entry.ranks[1:]],
        )
        return Beam([*self.tokens, token], [*self.logprobs, own], self.cumulative + entry.logprobs[at])


@dataclass(frozen=True, slots=True)
class Answer:
    """A beam that has ended, and its score."""

    beam: Beam
    score: float
    reason: FinishReason


class BeamSearch:
    """The beams of one request. `beams` go on; `answers` have ended, the best first."""

    def __init__(
        self,
        width: int,
        limit: int,
        stop_ids: frozenset[int],
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """width: beams, and answers in the end. limit: tokens of the longest answer. min_tokens: tokens before a stop
        token may come. early_stopping: end with the first `width` answers, though better ones may follow."""
        self.beams = [Beam([], [])]
        self.answers: list[Answer] = []
        self._width = width
        self._limit = limit
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    @property
    def candidates(self) -> int:
        """Tokens to know of each beam: as many as can go on, and all that can end it."""
        return self._width + len(self._stop_ids)

    def advance(self, entries: Sequence[TokenLogprobs]) -> bool:
        """Take what each beam's next token may be: entry i lists the `candidates` best for `beams[i]` behind the one
        that was drawn. True when the search is over."""
        length = len(self.beams[0].tokens) + 1
        found = [
            (beam.cumulative + logprob, token, beam, entry)
            for beam, entry in zip(self.beams, entries, strict=True)
            for token, logprob in zip(entry.ids[1:], entry.logprobs[1:], strict=True)
            if token not in self._stop_ids or length > self._min_tokens
        ]
        found.sort(key=lambda candidate: -candidate[0])
        beams: list[Beam] = []
        for rank, (_, token, beam, entry) in enumerate(found):
            if len(beams) == self._width or (rank >= self._width and length >= self._limit):
                break
            stops = token in self._stop_ids
            if not stops and length < self._limit:
                beams.append(beam.followed_by(token, entry))
            elif rank < self._width:
                self._end(beam.followed_by(token, entry), FinishReason.STOP if stops else FinishReason.LENGTH)
        self.beams = beams
        return not beams or self._settled(length)

    def _end(self, beam: Beam, reason: FinishReason) -> None:
        score = beam.cumulative / len(beam.tokens) ** self._length_penalty
        self.answers.append(Answer(beam, score, reason))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self._width :]

    def _settled(self, length: int) -> bool:
        """Whether no beam can become a better answer than those that are there."""
        if len(self.answers) < self._width:
            return False
        best: float = self.beams[0].cumulative / length**self._length_penalty
        return self._early_stopping or best <= self.answers[-1].score
