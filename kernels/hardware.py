"""Facts of a device that launchers size their grids by."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number on a CPU, where the interpreter runs programs in turn."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
