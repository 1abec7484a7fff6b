"""Plays the gate's sequences through a runner, by plans written here: the device side without a scheduler.

Teacher forcing is by the contract: a row start says which tokens a row holds, so before each decoding step the row is
started again with one more forced token, over the token that was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.cache.spec import Recurrent
from engine.cache.writes import BlockWrite
from engine.core.plan import RowStart, Runner, StepPlan
from engine.types import SamplingParams, TokenLogprobs
from tests.gate.oracle import Sequence
from tests.gate.verdict import NUM_LOGPROBS

GREEDY = SamplingParams(temperature=0.0, max_tokens=100, logprobs=NUM_LOGPROBS)


@dataclass
class Track:
    """A sequence on its way: tokens computed, blocks owned (in shuffled order), entries heard."""

    sequence: Sequence
    row: int
    blocks: list[int]
    done: int = 0
    heard: list[TokenLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.sequence.prompt + self.sequence.forced

    @property
    def finished(self) -> bool:
        return self.done == len(self.tokens)

    @property
    def known(self) -> int:
        """Tokens that the row may compute now: the prompt, then one more forced token a step."""
        return max(len(self.sequence.prompt), self.done + 1)


class PlanPlayer:
    """Plays on a runner whose pool holds every sequence of a call at once. Blocks are dealt in shuffled order."""

    def __init__(self, runner: Runner, chunk: int, seed: int = 7) -> None:
        self.runner = runner
        self.chunk = chunk
        self._step = 0
        self._writes: list[BlockWrite] = []
        self._deck = list(range(1, min(n for n in runner.info.pool.num_blocks if n)))
        random.Random(seed).shuffle(self._deck)

    def deal(self, sequences: Seq[Sequence]) -> list[Track]:
        """Rows and blocks for sequences."""
        size, at, tracks = self.runner.info.pool.block_size, 0, []
        for row, sequence in enumerate(sequences):
            need = -(-(len(sequence.prompt) + len(sequence.forced) + 1) // size)
            tracks.append(Track(sequence, row, self._deck[at : at + need]))
            at += need
        assert at <= len(self._deck), "the pool is too small for these sequences"
        return tracks

    def play(self, sequences: Seq[Sequence]) -> list[list[TokenLogprobs]]:
        """All sequences at once: log-probabilities at the FORCED + 1 positions of each."""
        return self.run(self.deal(sequences))

    def run(self, tracks: list[Track]) -> list[list[TokenLogprobs]]:
        """Play dealt tracks to their ends."""
        self.bind(tracks)
        return self.finish(tracks)

    def finish(self, tracks: list[Track]) -> list[list[TokenLogprobs]]:
        """Play bound tracks to their ends."""
        while not all(track.finished for track in tracks):
            self.advance(tracks)
        return [track.heard for track in tracks]

    def bind(self, tracks: list[Track]) -> None:
        """Put the tracks' blocks into the tables with the next step."""
        for track in tracks:
            for index, group in enumerate(self.runner.info.pool.groups):
                if not isinstance(group.spec, Recurrent):
                    self.write(BlockWrite(index, track.row, 0, track.blocks))

    def write(self, write: BlockWrite) -> None:
        """Change a table with the next step."""
        self._writes.append(write)

    def advance(self, tracks: list[Track]) -> None:
        """One step: every unfinished track computes up to `chunk` of the tokens it knows."""
        live = [track for track in tracks if not track.finished]
        live.sort(key=lambda track: min(self.chunk, track.known - track.done) > 1)
        count = [min(self.chunk, track.known - track.done) for track in live]
        samples = [track.done + n == track.known for track, n in zip(live, count, strict=True)]
        plan = StepPlan(
            step=self._step,
            rows=[track.row for track in live],
            first=[track.done for track in live],
            count=count,
            samples=samples,
            starts=[self._start(track) for track in live],
            block_writes=self._writes,
        )
        self._step, self._writes = self._step + 1, []
        result = self.runner.launch(plan).wait()
        assert not result.errors, result.errors
        for i, track in enumerate(live):
            track.done += count[i]
            if samples[i]:
                track.heard += result.logprobs[i]

    def _start(self, track: Track) -> RowStart:
        slot = track.row + 1 if self.runner.info.pool.num_state_slots else 0
        return RowStart(track.row, track.tokens[: track.known], len(track.sequence.prompt), GREEDY, state_slot=slot)
