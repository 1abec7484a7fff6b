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
class Line:
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

    def deal(self, sequences: Seq[Sequence]) -> list[Line]:
        """Rows and blocks for sequences."""
        size, at, lines = self.runner.info.pool.block_size, 0, []
        for row, sequence in enumerate(sequences):
            need = -(-(len(sequence.prompt) + len(sequence.forced) + 1) // size)
            lines.append(Line(sequence, row, self._deck[at : at + need]))
            at += need
        assert at <= len(self._deck), "the pool is too small for these sequences"
        return lines

    def play(self, sequences: Seq[Sequence]) -> list[list[TokenLogprobs]]:
        """All sequences at once: log-probabilities at the FORCED + 1 positions of each."""
        return self.run(self.deal(sequences))

    def run(self, lines: list[Line]) -> list[list[TokenLogprobs]]:
        """Play dealt lines to their ends."""
        self.bind(lines)
        return self.finish(lines)

    def finish(self, lines: list[Line]) -> list[list[TokenLogprobs]]:
        """Play bound lines to their ends."""
        while not all(line.finished for line in lines):
            self.advance(lines)
        return [line.heard for line in lines]

    def bind(self, lines: list[Line]) -> None:
        """Put the lines' blocks into the tables with the next step."""
        for line in lines:
            for index, group in enumerate(self.runner.info.pool.groups):
                if not isinstance(group.spec, Recurrent):
                    self.write(BlockWrite(index, line.row, 0, line.blocks))

    def write(self, write: BlockWrite) -> None:
        """Change a table with the next step."""
        self._writes.append(write)

    def advance(self, lines: list[Line]) -> None:
        """One step: every unfinished line computes up to `chunk` of the tokens it knows."""
        live = [line for line in lines if not line.finished]
        live.sort(key=lambda line: min(self.chunk, line.known - line.done) > 1)
        count = [min(self.chunk, line.known - line.done) for line in live]
        samples = [line.done + n == line.known for line, n in zip(live, count, strict=True)]
        plan = StepPlan(
            step=self._step,
            rows=[line.row for line in live],
            first=[line.done for line in live],
            count=count,
            samples=samples,
            starts=[self._start(line) for line in live],
            block_writes=self._writes,
        )
        self._step, self._writes = self._step + 1, []
        result = self.runner.launch(plan).wait()
        assert not result.errors, result.errors
        for i, line in enumerate(live):
            line.done += count[i]
            if samples[i]:
                line.heard += result.logprobs[i]

    def _start(self, line: Line) -> RowStart:
        slot = line.row + 1 if self.runner.info.pool.num_state_slots else 0
        return RowStart(line.row, line.tokens[: line.known], len(line.sequence.prompt), GREEDY, state_slot=slot)
