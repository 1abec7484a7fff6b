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


@lru_cache(maxsize=16)
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels can start while the one before them ends (programmatic dependent launch): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def bulk_copies(device: torch.device) -> bool:
    """Whether the device has a bulk tensor copy engine (TMA): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def group_products(device: torch.device) -> bool:
    """Whether groups of four warps multiply from shared memory (WGMMA): Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
