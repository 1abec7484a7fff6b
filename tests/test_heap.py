"""What stands is out of the collector's sight, and what was freed goes back to the system."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import deque

from engine import heap

PROGRAM = """
from pathlib import Path
from engine import heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

held = [bytes(1000) for _ in range(60_000)]
held, last = [], held[-1]  # the last one keeps what lies before it from going back by itself
before = resident()
heap.trim_malloc()
print(before - resident())
"""


def test_after_a_freeze_a_collection_walks_only_what_came_since() -> None:
    thresholds, kept = gc.get_threshold(), [[i] for i in range(1000)]
    try:
        heap.freeze()
        assert gc.get_freeze_count() > len(kept)
        later = [[i] for i in range(10)]
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        assert len(later) == 10
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1, "what came since is still collected"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_rings_that_came_since_do_not_pile_up() -> None:
    """A request leaves rings behind; what of them waits for the collector is memory that a server grows by."""
    thresholds = gc.get_threshold()
    alive = 0

    class Ring:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            self.own = self

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    try:
        heap.freeze()
        heap.collect_often()
        most, in_flight = 0, deque[Ring](maxlen=200)
        for _ in range(1_000_000):
            in_flight.append(Ring())
            most = max(most, alive)
        assert most <= 2_000 + 20 * 200, "each collection finds some in flight, which wait for a later one"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_freed_memory_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 40_000_000


def test_what_is_freed_while_serving_goes_back_too() -> None:
    regularly = "import time; heap._TRIM_S = 0.1; heap.keep_trimmed(); time.sleep(1)"
    program = PROGRAM.replace("heap.trim_malloc()", regularly)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 40_000_000
