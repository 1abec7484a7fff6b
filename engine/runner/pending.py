"""A step behind the decoder: what draws its tokens, then those on their way to the host while the next is prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import StepResult
from engine.runner.drafting import Verify
from engine.sampling.sampler import Drawn
from engine.types import TokenLogprobs
from kernels.select import Ops

NOT_FINITE = (
    "the model gave logits that are not finite numbers for this request, or everything was banned; it cannot go on"
)


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """A step behind the decoder, before its draws, of T tokens and E draws.

    x           [T, hidden]  the residual stream, or [E, hidden] where only `drawing` was kept of it
    drawing     [E, hidden]  of it what draws: each entry's last token, with drafts each of its draws
    verify      what drafts are verified by, in a step with drafts
    Once the step is drawn for good,
    advance_states  brings running states up to the accepted drafts
    follow          lets what drafts on the device compute the step's tokens too
    """

    x: torch.Tensor
    drawing: torch.Tensor
    verify: Verify | None = None
    advance_states: Callable[[], None] | None = None
    follow: Callable[[], None] | None = None

    def finish(self, follows: bool = True) -> None:
        """The step is drawn for good."""
        if self.advance_states is not None:
            self.advance_states()
        if self.follow is not None and follows:
            self.follow()


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A decoded step with the logits of its draws [E, C], of this rank's tokens, and a plain draw from them."""

    decoded: DecodedStep
    logits: torch.Tensor
    draw: Callable[[], Drawn]


class Download:
    """Tensors of whole 32-bit words on their way down. On a GPU they land in pinned memory behind one event; on CPU
    they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor], ops: Ops) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._hosts = list(tensors)
            return
        self._hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self._hosts, tensors, strict=True):
            ops.move_words(tensor.contiguous().view(-1).view(torch.int32), host.view(-1).view(torch.int32))
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._hosts


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Which of the downloaded prompt log-probabilities belong to an entry, and how many it asked for."""

    entry: int
    start: int
    stop: int
    count: int


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Entries of a plan and the download of what they gave.

    The download holds the tokens [B], then, when asked for, ids, logprobs and ranks [B, k + 1] of the drawn tokens,
    then those of prompt tokens [P, k + 1]. wanted[entry] is how many log-probabilities an entry asked for. places says
    where the plan's entries stand among the tokens of a padded step. In a step with drafts there is a place a draw,
    places says where each entry's begin, and behind the tokens stands how many each entry gave: the plan's at `gave`.
    """

    step: int
    samples: Sequence[bool]
    download: Download
    wanted: dict[int, int]
    prompts: Sequence[PromptLogprobs]
    places: Sequence[int] | None = None
    gave: Sequence[int] | None = None

    @property
    def done(self) -> bool:
        """Whether the step's tokens are on the host."""
        return self.download.done

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        tensors = self.download.wait()
        tokens, rest = tensors[0].tolist(), tensors[1:]
        at: Sequence[int] = range(len(self.samples)) if self.places is None else self.places
        given, accepted = [1] * len(self.samples), {}
        if self.gave is not None:
            told, rest = rest[0].tolist(), rest[1:]
            given = [told[entry] for entry in self.gave]
            accepted = {i: tokens[at[i] + 1 : at[i] + count] for i, count in enumerate(given) if count > 1}
        drawn = [tokens[place] if sampled else -1 for place, sampled in zip(at, self.samples, strict=True)]
        errors = {i: NOT_FINITE for i, sampled in enumerate(self.samples) if sampled and drawn[i] < 0}
        logprobs = {}
        if self.wanted:
            parts, rest = rest[:3], rest[3:]
            logprobs = {
                entry: [_token_logprobs(parts, at[entry] + n, k) for n in range(given[entry])]
                for entry, k in self.wanted.items()
                if entry not in errors
            }
        prompt_logprobs = {
            asked.entry: [_token_logprobs(rest, i, asked.count) for i in range(asked.start, asked.stop)]
            for asked in self.prompts
        }
        return StepResult(self.step, drawn, logprobs, prompt_logprobs, errors, accepted)


class MaskedStep:
    """A launched step whose tokens are drawn by `draw`: `finish` does so and starts their download. rows: where masks
    are to be written."""

    def __init__(self, rows: Callable[[int, int], npt.NDArray[np.int32]], finish: Callable[[], PendingStep]) -> None:
        self._rows = rows
        self._finish = finish
        self._has_rows = False
        self._step: PendingStep | None = None

    @property
    def done(self) -> bool:
        return self._step is not None and self._step.done

    def mask_rows(self, count: int, words: int) -> npt.NDArray[np.int32]:
        """[count, words] int32, as the plan's masked entries stand."""
        self._has_rows = True
        return self._rows(count, words)

    def draw(self) -> None:
        if self._step is not None:
            raise ValueError("this step's tokens are drawn already")
        if not self._has_rows:
            raise ValueError("the masks of this step were not written: call mask_rows() first")
        self._step = self._finish()

    def wait(self) -> StepResult:
        if self._step is None:
            raise ValueError("the masked entries of this step have not drawn: call draw() first")
        return self._step.wait()


def _token_logprobs(parts: Sequence[torch.Tensor], index: int, count: int) -> TokenLogprobs:
    ids, values, ranks = (part[index, : count + 1].tolist() for part in parts)
    return TokenLogprobs(ids, values, ranks)
