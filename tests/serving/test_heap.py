"""What stands is out of the collector's sight."""

from __future__ import annotations

import gc

from engine.serving import heap


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
