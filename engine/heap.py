"""Memory of a process that serves: what is free goes back to the system, what stands is not walked again."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time

# Between two trims of a process that serves. One takes 1 to 6 ms, in which other threads may wait for memory.
_TRIM_S = 60.0


def trim_malloc() -> None:
    """Return what this process has freed and its C library keeps: after a load, half of what a frontend holds. Does
    nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_trimmed() -> None:
    """Trim each minute, in a thread of its own. What requests leave between what stays is not given back by itself: an
    engine keeps 5 to 10 MB of it, after bursts much more."""
    threading.Thread(target=_trim, name="trim", daemon=True).start()


def _trim() -> None:
    while True:
        time.sleep(_TRIM_S)
        trim_malloc()


def collect_seldom() -> None:
    """Collect rarely: a step makes thousands of objects that die young, for which the default would collect several
    times."""
    gc.set_threshold(100_000, 20, 50)


def collect_often() -> None:
    """Collect often, for a process whose requests leave rings of some 9 KB each, behind `freeze`: what is in flight at
    a collection waits for one of an older generation, which is small then and costs a few milliseconds."""
    gc.set_threshold(2_000, 10, 5)


def freeze() -> None:
    """Take what stands now out of the garbage collector's sight: it lives as long as the process, and walking a
    tokenizer's vocabulary holds every stream up for 20 to 30 ms."""
    gc.collect()
    gc.freeze()
    # CPython collects the oldest generation when a quarter more waits there than its last collection left, which was
    # all that is frozen now.
    gc.collect()
