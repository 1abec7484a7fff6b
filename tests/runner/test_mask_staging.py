"""Masks are written where they go up from, step after step."""

from __future__ import annotations

import numpy as np
import torch

from engine.runner.mask_staging import MaskStaging

CPU = torch.device("cpu")


def test_what_was_written_is_sent_with_the_places_of_its_draws() -> None:
    staging = MaskStaging(CPU)
    for places in ([3], [0, 2, 5], [7, 1], list(range(40))):
        rows = staging.rows(len(places), 7)
        rows[:] = np.arange(7 * len(places)).reshape(-1, 7) - 3
        masks = staging.send(places)
        assert masks.entries.tolist() == places
        assert masks.bits.tolist() == rows.tolist()
        assert masks.bits.dtype == masks.entries.dtype == torch.int32


def test_memory_is_kept_from_step_to_step() -> None:
    staging = MaskStaging(CPU)
    first = staging.rows(64, 100)
    assert all(np.shares_memory(staging.rows(count, 100), first) for count in (64, 1, 63, 64))


def test_masks_begin_on_16_bytes() -> None:
    """Kernels are compiled anew for pointers that do not."""
    staging = MaskStaging(CPU)
    for count in range(1, 10):
        staging.rows(count, 5)
        assert (staging.send(range(count)).bits.data_ptr() - staging._hosts[0].data_ptr()) % 16 == 0
