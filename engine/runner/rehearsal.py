"""Steps of dummy lines that go ahead of serving, so that no step is the first to need a kernel.

Launchers choose tiles and splits by what the host knows of a step: lines of one token, longer lines, tokens, the
longest context. The steps here pass every border of those choices; a test plays random steps against them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.runner.inputs import LONGER
from engine.sampling.sampler import PLAIN, Wishes
from engine.types import MAX_LOGPROBS

# Log-probabilities come in these numbers, because each number is a kernel of its own.
LOGPROBS = (0, 1, 5, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A step: `singles` lines of one token, then `longer` lines of `count` tokens, each behind `first` cached ones.

    masked: all of them draw under a mask. drafts: the longer lines draw behind each of their tokens.
    """

    singles: int
    longer: int
    first: int
    count: int
    wishes: Wishes = PLAIN
    masked: bool = False
    drafts: bool = False

    @property
    def tokens(self) -> int:
        return self.singles + self.longer * self.count

    @property
    def brief(self) -> bool:
        """Whether it is one of the few that run for real, so that libraries load what each number of tokens needs."""
        return (
            self.first == 0
            and self.singles in (0, self.tokens)
            and self.longer <= 1
            and self.wishes == PLAIN
            and not self.masked
            and not self.drafts
        )


def logprobs_bucket(count: int) -> int:
    """How many log-probabilities are computed for a step that wants `count`."""
    return next(n for n in LOGPROBS if n >= count)


def rehearsals(max_rows: int, token_budget: int, max_model_len: int, max_drafts: int = 0) -> list[Rehearsal]:
    """What to play, for an engine of these limits."""
    contexts = (0, 100, 2048)
    most = max_rows + LONGER  # of a padded step
    singles = (1, 2, 5, 9, 17, 32, 33, 49, 64, 65, 97, 113, 128, 129, max_rows, most)
    made = [Rehearsal(lines, 0, first, 0) for lines in singles for first in contexts]
    # Beside prompts such numbers of lines take other kernels.
    made += [Rehearsal(lines, 1, first, 2) for lines in singles if 16 <= lines <= 128 for first in (0, 2048)]
    for wishes in (Wishes(penalties=True), *(Wishes(num_logprobs=count) for count in LOGPROBS)):
        made += [Rehearsal(lines, 0, 40, 0, wishes) for lines in (1, 16)]
    made += [Rehearsal(lines, 0, 40, 0, masked=True) for lines in (1, 16)]
    counts = sorted(n for i in range(1, 12) for n in (1 << i, (1 << i) + 1))
    made += [Rehearsal(0, 1, first, count) for count in counts for first in contexts]
    made += [Rehearsal(8, 1, 0, count) for count in counts]
    # The last border lies behind 4,096 tokens.
    longer = -(-4097 // max_model_len)
    made.append(Rehearsal(0, longer, 0, -(-4097 // longer)))
    # many lines of a few tokens: the rest of prompts whose beginning was cached
    made += [Rehearsal(0, lines, first, count) for lines in (4, 70, 130) for first in contexts for count in (3, 40)]
    if max_drafts:
        deep = [depth for depth in (1, 2, 4, 8) if depth < max_drafts] + [max_drafts]
        made += [
            Rehearsal(singles, lines, first, 1 + depth, drafts=True)
            for depth in deep
            for lines in (1, 2, 4, 8, 16, 32, 64, 128, 256, max_rows)
            for singles, first in ((0, 0), (0, 2048), (8, 100))
        ]
        for wishes in (Wishes(penalties=True), *(Wishes(num_logprobs=count) for count in LOGPROBS)):
            made += [Rehearsal(0, lines, 40, 1 + max_drafts, wishes, drafts=True) for lines in (1, 16)]
        made += [Rehearsal(0, lines, 40, 1 + max_drafts, masked=True, drafts=True) for lines in (1, 16)]
    return [
        step
        for step in dict.fromkeys(made)
        if step.count != 1
        and step.singles + step.longer <= most
        and step.tokens <= token_budget
        and step.first + max(step.count, 1) <= max_model_len
    ]
