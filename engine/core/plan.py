"""The contract between deciding and executing: one `StepPlan` goes down, one `StepResult` comes up.

Both are plain ints, lists and arrays, so that a plan can be broadcast to other ranks as it is and a scheduler can be
tested without a device.

The runner keeps tables with one row a running request: token ids, block ids, sampling parameters. A plan only says what
changed (`starts`, `block_writes`) and what to compute (`rows`, `first`, `count`), so a steady decode step costs a
few integers a row. Sampled token ids stay on the device: a plan for step N+1 can be made before step N's tokens
are known.

An entry that samples gives one token, or with k drafted ones up to 1 + k. How many are accepted is known on the device
first: until the result is committed, a later plan counts on all of them, and the runner goes by the row's true length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.cache.spec import PoolSpec
from engine.cache.writes import BlockWrite, StateCopy
from engine.config import MAX_DRAFTS
from engine.types import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Masks = npt.NDArray[np.int32]

# Upper bounds, with the bound, of the buckets by which steps are counted: vLLM's.
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Drafts an entry that steps are padded to: with its token 2, 4 and 8, which fill the tiles of kernels, and between.
DRAFT_COUNTS = (1, 3, 5, 7, MAX_DRAFTS)


def draft_depths(most: int) -> tuple[int, ...]:
    """Drafts an entry of padded steps, rising, where an entry has at most so many; none of 0."""
    return (*(depth for depth in DRAFT_COUNTS if depth < most), most) if most else ()


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row of the tables: at admission, and again after a preemption.

    token_ids: every token known so far (prompt, then tokens generated in an earlier life).
    num_prompt: how many of them are prompt; penalties and min_tokens count the rest as output.
    eos_ids: tokens that min_tokens suppresses, besides params.stop_token_ids (empty when ignore_eos).
    state_slot: the slot of the state pool that the row's recurrent layers update; 0 when the model has none. An entry
    with first == 0 starts from a zero state whatever the slot held; otherwise a state copy of the same plan fills it.
    """

    row: int
    token_ids: Sequence[int]
    num_prompt: int
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    state_slot: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that an entry computes behind the last one of its row, before they are known to follow.

    count: how many (k). tokens[j] is proposed for position start + j; `start` is the least that the row can hold, so
    the entry finds its own among them whatever an earlier step gave. A position without a proposal is computed with
    any token. What is proposed changes no result, only how much of it comes at once.
    """

    count: int
    start: int
    tokens: Sequence[int]

    def behind(self, held: int) -> list[int]:
        """The drafted tokens of a row that truly holds `held`."""
        last = len(self.tokens) - 1
        return [self.tokens[min(max(held + i - self.start, 0), last)] for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Entry i computes tokens [first[i], first[i] + count[i]) of row rows[i].

    samples[i] says that entry i reaches the end of what is known and draws the next token, which is put at position
    first[i] + count[i] of the row's tokens. Entries with count 1 come first.
    drafts[i] says that entry i, which samples, may give 1 + drafts[i].count tokens; it computes one token of its own
    and the drafted ones, and draws behind each. Its recurrent state afterwards is that behind the accepted tokens.
    A row whose last entry was drafted and is not committed holds fewer tokens than planned if drafts are rejected. The
    entry is then as long as planned and begins that much earlier: at the row's true last token.
    masked are entries whose draw waits until it is known which tokens they may draw (`MaskedPending.draw`).
    follows: what drafts on the device, if anything does, computes the step's tokens too. Behind tokens that it did not
    compute its drafts are worse.
    Order of side effects: starts, block_writes, state_copies, compute, sample.
    """

    step: int
    rows: list[int]
    first: list[int]
    count: list[int]
    samples: list[bool]
    starts: list[RowStart] = field(default_factory=list)
    block_writes: list[BlockWrite] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)
    masked: Sequence[int] = ()
    follows: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.count)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave, aligned with the plan's entries: tokens[i] is the drawn token, or -1 where samples[i] is
    false.

    accepted[i] holds the tokens that entry i gave behind tokens[i]: one more for each draft that equals the token drawn
    in its place. Entries that gave one token are not in it.
    errors maps an entry to a sentence when that entry alone failed (its logits were not finite).
    logprobs holds, for the entries whose request asked for them, one for each token given. prompt_logprobs: item i
    of an entry is for the prompt token at position first + i + 1, as predicted by the computed token at first + i; the
    list ends before the token that the entry itself draws.
    """

    step: int
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    accepted: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixedShapes:
    """What a runner pads steps of rows and up to `chunks` chunks of prompts to: rows to the next of `rows`, missing
    chunks by one token each, all tokens to the next of `tokens`. Empty when it pads none.

    wave_aligned_tokens: of `tokens`, what to fill beside decoding rows, since a token is cheapest there.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    chunks: int = 0
    wave_aligned_tokens: int = 0

    def room(self, rows: int, max_tokens: int) -> int:
        """Prompt tokens that fill the largest shape of up to `max_tokens` tokens beside `rows` rows; 0 without one."""
        padded, tokens = bisect_left(self.rows, rows), bisect_right(self.tokens, max_tokens)
        if padded == len(self.rows) or not tokens:
            return 0
        return max(0, self.tokens[tokens - 1] - self.rows[padded] - (self.chunks - 1))

    def fit(self, rows: int, prompt: int, chunks: int) -> tuple[int, int] | None:
        """Rows and all tokens that a step of `rows` rows and `prompt` tokens in `chunks` chunks is padded to; None when
        no shape holds it."""
        padded = bisect_left(self.rows, rows)
        if padded == len(self.rows) or not 0 < chunks <= self.chunks:
            return None
        tokens = bisect_left(self.tokens, self.rows[padded] + prompt + self.chunks - chunks)
        return (self.rows[padded], self.tokens[tokens]) if tokens < len(self.tokens) else None

    def padded(self, rows: int, prompt: int, chunks: int) -> int:
        """All tokens of a step, with those it is padded by."""
        shape = self.fit(rows, prompt, chunks)
        return rows + prompt if shape is None else shape[1]


NO_SHAPES = MixedShapes()


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What deciding needs to know of the model and of the memory that executing set aside.

    max_model_len: positions a request may occupy. eos_ids: tokens that end a request. active: the part of the weights
    that a token is multiplied by, 0 to 1. mixed: shapes of mixed steps. weight_bits: of a weight, on average.
    """

    pool: PoolSpec
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    active: float = 1.0
    mixed: MixedShapes = NO_SHAPES
    weight_bits: float = 16.0

    @property
    def costs(self) -> tuple[float, float, int]:
        """What decides how many prompt tokens a step had best take (`engine.core.prefill_policy`)."""
        return self.active, self.weight_bits, self.mixed.wave_aligned_tokens


class Pending(Protocol):
    """A launched step."""

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...


class MaskedPending(Pending, Protocol):
    """A launched step of a plan with masked entries."""

    def mask_rows(self, count: int, words: int) -> Masks:
        """Where the step's masks are to be written before `draw`: [count, words] int32 of any content, of each masked
        entry, and behind it of each of its drafts. Bit v % 32 of word v // 32 says whether it may draw token v there.
        Called once; one step at a time is between this and `draw`."""
        ...

    def draw(self) -> None:
        """Draw the step's tokens, by the masks that were written: called once, and before `wait`."""
        ...


class Runner(Protocol):
    """Executes plans in the order they are launched. All the loop knows of the device side."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def num_late_compiles(self) -> int:
        """Kernels that were compiled after the runner was ready; each held up the steps behind it."""
        ...

    def launch(self, plan: StepPlan) -> Pending: ...

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        """Whether a step of `entries` entries of up to `depth` drafts each beside `singles` of one token is launched as
        fast as others, with nothing to be made first."""
        ...

    def idle(self) -> bool:
        """Nothing is asked for: do a piece of work that was put off. False when there is none left."""
        ...

    def close(self) -> None: ...
