"""Memory of a process that serves: what is free goes back to the system, what stands is not walked again."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def trim_malloc() -> None:
    """Return what this process has freed and its C library keeps: after a load, half of what a frontend holds. Does
    nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_seldom() -> None:
    """Collect rarely: a step makes thousands of objects that die young, for which the default would collect several
    times."""
    gc.set_threshold(100_000, 20, 50)


def freeze() -> None:
    """Take what stands now out of the garbage collector's sight: it lives as long as the process, and walking a
    tokenizer's vocabulary holds every stream up for 20 to 30 ms. What comes later is collected often enough that the
    rings of a few hundred requests, some 9 KB each, are all that waits."""
    gc.set_threshold(10_000, 20, 50)
    gc.collect()
    gc.freeze()
