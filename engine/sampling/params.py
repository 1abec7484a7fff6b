"""A row's parameters as they lie on the device: a column of 32-bit words, floats bit by bit, and two of 64 bits."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import RowStart

# Order of the words: floats, top_k, num_prompt; of the long ones: seed, slot of recurrent state.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NUM_PARAMS, NUM_LONG = len(FLOATS) + 2, 2
_FLOATS_OF = attrgetter(*FLOATS)


def param_words(start: RowStart) -> npt.NDArray[np.int32]:
    """A row's column: NUM_PARAMS words."""
    params = start.params
    floats = np.array(_FLOATS_OF(params), np.float32).view(np.int32)
    return np.concatenate((floats, (min(params.top_k, 2**31 - 1), start.num_prompt)), dtype=np.int32)


def long_words(start: RowStart) -> npt.NDArray[np.int32]:
    """A row's long ones, [NUM_LONG, 2] words. A request without seed is greedy, or its frontend forgot to draw one."""
    params = start.params
    if params.seed is None and not params.greedy:
        raise ValueError("a request that samples reached the engine without a seed: it could not be replayed")
    return np.array([[params.seed or 0], [start.state_slot]], np.int64).view(np.int32)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Parameters of every row, each [R]: float32, but top_k and num_prompt int32, seeds and state_slots int64."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    top_k: torch.Tensor
    num_prompt: torch.Tensor
    seeds: torch.Tensor
    state_slots: torch.Tensor

    @classmethod
    def of(cls, words: torch.Tensor, long: torch.Tensor) -> RowParams:
        """Views of words [NUM_PARAMS, R] int32 and long [NUM_LONG, R] int64."""
        temperature, top_p, min_p, repetition, presence, frequency = words[: len(FLOATS)].view(torch.float32)
        top_k, num_prompt = words[len(FLOATS) :]
        penalties = (repetition, presence, frequency)
        return cls(temperature, top_p, min_p, *penalties, top_k, num_prompt, *long)
