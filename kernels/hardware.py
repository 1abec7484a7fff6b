"""Facts of a device that launchers size their grids by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@lru_cache(maxsize=16)
def group_products(device: torch.device) -> bool:
    """Whether groups of four warps multiply from shared memory (WGMMA): Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=16)
def _branch_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def branch(device: torch.device, wanted: bool = True) -> Iterator[Callable[[], None]]:
    """Launches of the block run beside those after it, when they are captured in a graph; else in order, as ever.

    Gives what joins the two again: to be called after the block, before anything that needs its results. The branches
    must not write to the same memory, counters of arrivals included.
    """
    if not wanted or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(device), _branch_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)
