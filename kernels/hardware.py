"""Facts of a device that launchers choose kernels and size grids by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.tuned.tables import DEFAULT, name_of


@dataclass(frozen=True, slots=True)
class Gpu:
    """What launchers ask of a GPU.

    capability: CUDA compute capability, (major, minor). multiprocessors: streaming multiprocessors. table: of its tuned
    numbers (`kernels.tuned.tables`).
    """

    capability: tuple[int, int]
    multiprocessors: int
    table: str = DEFAULT


# The first with instructions that convert 8-bit floats (e4m3): Ada.
FP8_CAPABILITY = (8, 9)

# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"); on others the least. Tiles were tuned where there is more than that.
_SHARED_BYTES = {(8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
MIN_SHARED, MAX_SHARED = 99 << 10, 227 << 10

_described: ContextVar[Gpu | None] = ContextVar("described", default=None)


@contextmanager
def described(gpu: Gpu) -> Iterator[None]:
    """Within, for this thread, every CUDA device is `gpu`, whatever the machine has. So launchers can be walked for a
    GPU that is not there (`kernels.compile_all`)."""
    token = _described.set(gpu)
    try:
        yield
    finally:
        _described.reset(token)


@lru_cache(maxsize=16)
def _asked(device: torch.device) -> Gpu:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    table = name_of(torch.cuda.get_device_name(device))
    return Gpu(torch.cuda.get_device_capability(device), count, table)


def _gpu(device: torch.device) -> Gpu:
    return _described.get() or _asked(device)


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number on a CPU, where the interpreter runs programs in turn."""
    return _gpu(device).multiprocessors if device.type == "cuda" else 4


def tuned(device: torch.device) -> str:
    """The name of a device's table of tuned numbers (`kernels.tuned.tables`)."""
    return _gpu(device).table if device.type == "cuda" else DEFAULT


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels can start while the one before them ends (programmatic dependent launch): Hopper and later."""
    return device.type == "cuda" and _gpu(device).capability >= (9, 0)


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a block may have; the most there is on a CPU, where tiles are those of such GPUs."""
    return _SHARED_BYTES.get(_gpu(device).capability, MIN_SHARED) if device.type == "cuda" else MAX_SHARED


def large_shared_memory(device: torch.device) -> bool:
    """Whether a block may have 163 KiB of shared memory or more, as on GPUs of data centers; 99 KiB on others."""
    return shared_bytes(device) > MIN_SHARED


def register_products(device: torch.device) -> bool:
    """Whether a warp multiplies bfloat16 from registers (`mma.sync`): Ampere and later."""
    return device.type == "cuda" and _gpu(device).capability >= (8, 0)


def bulk_copies(device: torch.device) -> bool:
    """Whether the device has a bulk tensor copy engine (TMA): Hopper and later."""
    return device.type == "cuda" and _gpu(device).capability >= (9, 0)


def group_products(device: torch.device) -> bool:
    """Whether groups of four warps multiply from shared memory (WGMMA): Hopper alone."""
    return device.type == "cuda" and _gpu(device).capability[0] == 9


def fp8_conversions(device: torch.device) -> bool:
    """Whether the device converts 8-bit floats (e4m3): Ada and later. The references on a CPU do."""
    return device.type != "cuda" or _gpu(device).capability >= FP8_CAPABILITY
