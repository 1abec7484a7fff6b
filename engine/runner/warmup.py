"""Steps of dummy entries that go ahead of serving, so that no step is the first to need a kernel.

Launchers choose tiles and splits by what the host knows of a step: entries of one token, longer entries, tokens, the
longest context. The steps here pass every threshold of those choices; a test plays random steps against them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.plan import draft_depths
from engine.runner.inputs import MULTI_TOKEN_ENTRIES
from engine.sampling.sampler import PLAIN, SamplingExtras
from engine.types import MAX_LOGPROBS

# Log-probabilities come in these numbers, because each number is a kernel of its own.
LOGPROBS = (0, 1, 5, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class WarmupStep:
    """A step: `singles` entries of one token, then `longer` entries of `count` tokens, each behind `first` cached ones.

    masked: all of them draw under a mask. drafts: the longer entries draw behind each of their tokens. padded: like a
    step of a graph, with as many dummy entries as draft. whole_logits: they draw from the logits of all ranks' tokens.
    """

    singles: int
    longer: int
    first: int
    count: int
    extras: SamplingExtras = PLAIN
    masked: bool = False
    drafts: bool = False
    padded: bool = False
    whole_logits: bool = False

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
            and self.extras == PLAIN
            and not self.masked
            and not self.drafts
            and not self.whole_logits
        )


def logprobs_bucket(count: int) -> int:
    """How many log-probabilities are computed for a step that wants `count`."""
    return next(n for n in LOGPROBS if n >= count)


def warmup_steps(
    max_rows: int, token_budget: int, max_model_len: int, max_drafts: int = 0, merges: bool = False
) -> list[WarmupStep]:
    """What to play, for an engine of these limits. merges: most steps draw from candidates of the ranks, some not."""
    contexts = (0, 100, 2048)
    most = max_rows + MULTI_TOKEN_ENTRIES  # of a padded step
    singles = (1, 2, 3, 5, 9, 17, 32, 33, 49, 64, 65, 97, 113, 128, 129, max_rows, most)
    made = [WarmupStep(entries, 0, first, 0) for entries in singles for first in contexts]
    # Beside prompts such numbers of entries take other kernels.
    made += [WarmupStep(entries, 1, first, 2) for entries in singles if 16 <= entries <= 128 for first in (0, 2048)]
    for extras in (SamplingExtras(penalties=True), *(SamplingExtras(num_logprobs=count) for count in LOGPROBS)):
        made += [WarmupStep(entries, 0, 40, 0, extras) for entries in (1, 16)]
    made += [WarmupStep(entries, 0, 40, 0, masked=True) for entries in (1, 16)]
    if merges:
        edited = (PLAIN, SamplingExtras(penalties=True))
        made += [WarmupStep(entries, 0, 40, 0, extras, whole_logits=True) for extras in edited for entries in (1, 16)]
    counts = sorted(n for i in range(1, 12) for n in (1 << i, (1 << i) + 1))
    made += [WarmupStep(0, 1, first, count) for count in counts for first in contexts]
    made += [WarmupStep(8, 1, 0, count) for count in counts]
    # Tiles of experts go by pairs an expert: those of 128, 8 a token, have one for 272 to 399 tokens alone.
    made += [WarmupStep(0, 1, 0, 3 << i) for i in range(5, 10)]
    # All thresholds but those of many experts lie below 4,097 tokens. One entry may have room for fewer.
    for count in (*counts, 4097):
        longer = -(-count // max_model_len)
        made.append(WarmupStep(0, longer, 0, -(-count // longer)))
    longer = max(2, -(-token_budget // max_model_len))
    made.append(WarmupStep(0, longer, 0, token_budget // longer))
    # many entries of a few tokens: the rest of prompts whose beginning was cached
    made += [
        WarmupStep(0, entries, first, count) for entries in (4, 70, 130) for first in contexts for count in (3, 40)
    ]
    if max_drafts:
        made += [
            WarmupStep(singles, entries, first, 1 + depth, drafts=True)
            for depth in draft_depths(max_drafts)
            for entries in (1, 2, 4, 8, 16, 32, 64, 128, 256, max_rows)
            for singles, first in ((0, 0), (0, 2048), (8, 100))
        ]
        made += [replace(step, padded=True) for step in made if step.drafts and not step.singles + step.first]
        for extras in (SamplingExtras(penalties=True), *(SamplingExtras(num_logprobs=count) for count in LOGPROBS)):
            made += [WarmupStep(0, entries, 40, 1 + max_drafts, extras, drafts=True) for entries in (1, 16)]
        made += [WarmupStep(0, entries, 40, 1 + max_drafts, masked=True, drafts=True) for entries in (1, 16)]
    return [
        step
        for step in dict.fromkeys(made)
        if step.count != 1
        and step.singles + step.longer <= most
        and step.tokens <= token_budget
        and step.first + max(step.count, 1) <= max_model_len
    ]
