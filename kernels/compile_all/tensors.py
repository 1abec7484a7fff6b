"""Inputs of cases on a GPU that is not there: tensors that have shape, strides, dtype and device, and no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from kernels.registry import Case
from kernels.testing import seeded

CUDA = torch.device("cuda", 0)
# Larger tensors of a case are made without memory; smaller ones hold values, by which some cases cut others.
LARGEST_BYTES = 1 << 20
# A case that needs the values of larger tensors is made in full up to here.
MAX_BYTES = 1 << 28


class NeedsValues(Exception):
    """A case is cut by values of tensors that are too large to be made here."""


def inputs(case: Case, mode: FakeTensorMode) -> dict[str, Any]:
    """The case's arguments on CUDA, laid out as `make` lays them out; tensors are of `mode`.

    Raises NeedsValues.
    """
    cpu = torch.device("cpu")
    try:
        with _Sparing(mode):
            made = case.make(cpu, seeded(cpu))
    except Exception as error:
        if case.bytes > MAX_BYTES:
            raise NeedsValues(f"its inputs ({case.bytes >> 20} MiB) are cut by their own values: {error}") from error
        made = case.make(cpu, seeded(cpu))
    moved = _Moved(mode)
    return {name: moved(value) for name, value in made.items()}


@contextmanager
def without_memory(mode: FakeTensorMode) -> Iterator[None]:
    """Within, torch's operations give tensors of `mode`, and every tensor tells an address: its offset in the memory
    that it is a view of, which torch's allocator begins at a multiple of 512 bytes."""
    with mode, _Answers():
        yield


def address(tensor: torch.Tensor) -> int:
    """In bytes, as `without_memory` says."""
    return int(tensor.storage_offset()) * tensor.element_size()


class _Sparing(TorchDispatchMode):
    """Makes tensors of more than LARGEST_BYTES, and what is computed from them, without memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        with self._mode:
            made = func(*args, **kwargs)
        if not given and isinstance(made, torch.Tensor) and made.numel() * made.element_size() <= LARGEST_BYTES:
            return func(*args, **kwargs)
        return made


class _Moved:
    """Moves values to CUDA: tensors keep strides, offsets and whether they stand in one memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._held: list[torch.UntypedStorage] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)
            for field in fields(value):
                object.__setattr__(made, field.name, self(getattr(value, field.name)))
            return made
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        with self._mode:
            if key not in self._memory:
                self._held.append(storage)  # so that its number stays its own
                count = storage.nbytes() // tensor.element_size()
                self._memory[key] = torch.empty(count, dtype=tensor.dtype, device=CUDA)
            return self._memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Answers(TorchFunctionMode):
    """Answers what torch can only do with tensors of a CUDA device where it was built for CUDA: it asks the device's
    library before a few of its operations, fake tensors or not. Those run over tensors of the CPU instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.data_ptr:
            return address(args[0])
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        out = kwargs.pop("out", None)
        args, kwargs = tree_map_only(torch.Tensor, partial(_like, device=torch.device("cpu")), (args, kwargs))
        made = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, partial(_like, device=CUDA), made) if out is None else out


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Another of its shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
