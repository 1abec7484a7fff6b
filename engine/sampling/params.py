"""Sampling parameters as they lie on the device: one column of 32-bit words a row, floats bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import RowStart

# Order of the words: floats, top_k, num_prompt, the seed's low and high half, the slot of recurrent state.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NUM_PARAMS = len(FLOATS) + 5
STATE_SLOT = NUM_PARAMS - 1


def param_words(start: RowStart) -> npt.NDArray[np.int32]:
    """A row's column: NUM_PARAMS words. A request without a seed is greedy, or its frontend forgot to draw one."""
    params = start.params
    if params.seed is None and not params.greedy:
        raise ValueError("a request that samples reached the engine without a seed: it could not be replayed")
    words = np.empty(NUM_PARAMS, np.int32)
    words[: len(FLOATS)] = np.array([getattr(params, name) for name in FLOATS], np.float32).view(np.int32)
    seed = np.array([params.seed or 0], np.int64).view(np.int32)
    words[len(FLOATS) :] = (min(params.top_k, 2**31 - 1), start.num_prompt, *seed, start.state_slot)
    return words


@dataclass(frozen=True, slots=True)
class LineParams:
    """Parameters of a step's lines, each [B]: float32, but top_k and num_prompt int32 and seeds int64."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    top_k: torch.Tensor
    num_prompt: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def gather(cls, table: torch.Tensor, rows: torch.Tensor) -> LineParams:
        """table [NUM_PARAMS, R] int32, rows [B] int32."""
        lines = table.index_select(1, rows)
        floats = lines[: len(FLOATS)].view(torch.float32)
        top_k, num_prompt, low, high = lines[len(FLOATS) : STATE_SLOT]
        seeds = torch.stack((low, high), dim=1).view(torch.int64).squeeze(1)
        temperature, top_p, min_p, repetition, presence, frequency = floats
        return cls(temperature, top_p, min_p, repetition, presence, frequency, top_k, num_prompt, seeds)
