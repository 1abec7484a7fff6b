"""Drafters for tests: they know what the scripted model will say, and say something else as often as they are told."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from tests.core.harness import continuation
from tests.core.scripted_runner import ScriptedRunner

# No draw of the scripted model gives it, so a draft of it never stands.
NEVER = 0


class Seer:
    """Proposes what follows, each token right with probability `right`, as many as it likes up to what is asked for."""

    def __init__(self, runner: ScriptedRunner, *, right: float = 1.0, few: bool = False, seed: int = 0) -> None:
        self._runner = runner
        self._right = right
        self._few = few
        self._random = random.Random(seed)

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        if self._few:
            count = self._random.randint(0, count)
        said = continuation(self._runner, tokens, count)
        return [token if self._random.random() < self._right else NEVER for token in said]

    def close(self, given: Sequence[int]) -> None:
        """It knew them."""


class Dumb:
    """Never has a proposal."""

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        return []

    def close(self, given: Sequence[int]) -> None:
        """It learns nothing from them."""
