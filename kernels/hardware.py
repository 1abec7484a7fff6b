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


class _DependentLaunch:
    """The switch of the process; see `allow_dependent_launch`."""

    allowed = True


def allow_dependent_launch(allowed: bool) -> None:
    """Let kernels start while the one before them ends (programmatic dependent launch), or not. For the process."""
    _DependentLaunch.allowed = allowed
    dependent_launch.cache_clear()


@lru_cache(maxsize=16)
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` use programmatic dependent launch: Hopper and later, unless it is switched off.

    Such a kernel is launched with `launch_pdl` and PDL=True. It calls gdc_launch_dependents() first and touches nothing
    that another kernel wrote, or may still be reading, before gdc_wait().
    """
    if device.type != "cuda" or not _DependentLaunch.allowed:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def bulk_copies(device: torch.device) -> bool:
    """Whether the device has a bulk tensor copy engine (TMA): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
