"""From the settings to what drafts for one request."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config import SpeculationConfig


class Drafter(Protocol):
    """As the engine's core calls it."""

    def propose(self, tokens: array[int], count: int) -> Sequence[int]: ...


def _ngram() -> Drafter:
    from engine.speculation.ngram import NgramDrafter  # here: the control side starts without numpy

    return NgramDrafter()


MAKERS: dict[str, Callable[[], Drafter]] = {"ngram": _ngram}


def maker(config: SpeculationConfig) -> Callable[[], Drafter] | None:
    """Makes the drafter of a request; None when nothing is drafted."""
    return MAKERS.get(config.method)
