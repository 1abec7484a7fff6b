"""How many threads torch takes on a CPU."""

from __future__ import annotations

import re

import torch

from engine import env
from engine.models.reader import ConfigError
from engine.types import shown

# Weights up to which one thread of a CPU is as fast as four or faster, and does not wait for others where other work
# takes their cores (four threads took 4.1 times as long for 8 MB, 1.3 times for 92, as long for 436 and 1,300).
ONE_THREAD_BYTES = 1 << 30
# A number for each level of nested threads; torch has one level. OpenMP takes anything else for nothing at all.
_COUNTS = re.compile(r"\s*\+?0*[1-9][0-9]{0,8}\s*(?:,\s*\+?0*[1-9][0-9]{0,8}\s*)*", re.ASCII)


def choose(num_bytes: int, said: str | None) -> None:
    """One thread for weights of few bytes, unless the environment has `said` otherwise, which torch reads itself.

    Raises ConfigError for what torch ignores: it would take every core."""
    if said is None:
        if num_bytes <= ONE_THREAD_BYTES:
            torch.set_num_threads(1)
    elif not _COUNTS.fullmatch(said):
        raise ConfigError(
            f"{env.THREADS} is {shown(said)!r}, and torch ignores it: set it to the number of free cores, or unset it "
            "to have Nereid choose"
        )
