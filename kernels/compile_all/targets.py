"""The GPUs that kernels are compiled for, and a driver of Triton that names one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.hardware import Gpu, described


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture, and the GPU whose multiprocessors stand for it.

    arch: as in sm_90. shared_bytes: shared memory that one block may have (CUDA C++ Programming Guide, table
    "Technical Specifications per Compute Capability": 163, 99 or 227 KiB). tensor_memory: columns that one block may
    have (PTX ISA, "Tensor Memory"), 0 where there is none.
    """

    arch: int
    gpu: str
    multiprocessors: int
    shared_bytes: int
    tensor_memory: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.arch, 10)


TARGETS = {
    target.arch: target
    for target in (
        Target(80, "A100", 108, 163 << 10),
        Target(86, "A10", 72, 99 << 10),
        Target(89, "L40S", 142, 99 << 10),
        Target(90, "H100", 132, 227 << 10),
        Target(100, "B200", 148, 227 << 10, tensor_memory=512),
        Target(120, "RTX 5090", 170, 99 << 10),
    )
}


class _Driver:
    """What Triton asks of a driver until a kernel is launched. The device's number is the architecture's, so that what
    functions keep for each device is kept for each architecture."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._target.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Within, Triton compiles for the target, and launchers choose for it. Triton's driver is the process's: no other
    thread may launch kernels meanwhile."""
    config: Any = triton.runtime.driver
    before = config._active
    config.set_active(_Driver(target))
    try:
        with described(Gpu(target.capability, target.multiprocessors)):
            yield
    finally:
        config._active = before
