"""From the settings to what drafts for one request."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config import SpeculationConfig


class Drafter(Protocol):
    """As the engine's core calls it."""

    def propose(self, tokens: array[int], count: int) -> Sequence[int]: ...

    def close(self, given: Sequence[int]) -> None: ...


# Imports stand where they are used: the control side starts without numpy.


def _ngram() -> Callable[[], Drafter]:
    from engine.speculation.ngram import NgramDrafter

    return NgramDrafter


def _suffix() -> Callable[[], Drafter]:
    from engine.speculation.suffix import Outputs, SuffixDrafter

    outputs = Outputs()
    return lambda: SuffixDrafter(outputs)


def _device() -> Callable[[], Drafter]:
    from engine.speculation.device import DeviceDrafter

    return DeviceDrafter


def _prediction() -> Callable[[], None]:
    return lambda: None


MAKERS: dict[str, Callable[[], Callable[[], Drafter | None]]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft": _device,
    "eagle3": _device,
    "mtp": _device,
    "prediction": _prediction,
}


def maker(config: SpeculationConfig) -> Callable[[], Drafter | None] | None:
    """Makes the drafter of each request of an engine, or None for one without; None when nothing is drafted."""
    made = MAKERS.get(config.method)
    return None if made is None else made()


def predicted(token_ids: Sequence[int], num_prompt: int, other: Drafter | None) -> Drafter:
    """The drafter of a request of `num_prompt` tokens that says what its answer will be."""
    from engine.speculation.prediction import PredictionDrafter

    return PredictionDrafter(token_ids, num_prompt, other)
