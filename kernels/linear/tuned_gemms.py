"""Products of many rows with algorithms of cublasLt that were measured to be faster than the library's own choice.

Tables of tuned numbers (`kernels.tuned`) name them by GPU, version of the library, sizes of the weight and rows of the
step; `perf.tune.blas` writes them. Anything else, and whatever the library refuses, is left to torch.
"""

from __future__ import annotations

import logging

import torch

from kernels.hardware import tuned
from kernels.linear.blas import ALIGNMENT, Algorithm, Blas, Plan, Product, Refused, open_library
from kernels.tuned.tables import Algorithms, tables

log = logging.getLogger(__name__)

# Steps of few tokens are padded to sizes that are in the table, those of many have any size: from here on they take the
# next size's, or the largest's. With 6,000 and with 16,448 rows that was faster than torch's choice; at 3,000, with the
# algorithms of 4,096, it was not.
LONG_ROWS = 6000
# Sizes of products that are remembered: steps without a graph have any number of rows.
MAX_PLANS = 4096


def find(algorithms: Algorithms, outputs: int, inputs: int, rows: int) -> Algorithm | None:
    """What these sizes take; long products take what the next number of rows that was measured takes, or the
    largest."""
    by_rows = algorithms.get((outputs, inputs), {})
    if rows >= LONG_ROWS:
        measured = [n for n in by_rows if n >= LONG_ROWS]
        rows = min((n for n in measured if n >= rows), default=max(measured, default=rows))
    found = by_rows.get(rows)
    return None if found is None else Algorithm(*found)


class Products:
    """Multiplies by the algorithms of the table. Its plans and the library's scratch memory are an engine's own."""

    def __init__(self) -> None:
        self._libraries: dict[torch.device, tuple[Blas, Algorithms] | None] = {}
        self._plans: dict[tuple[torch.device, Product], tuple[Blas, Plan] | None] = {}

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """residual + x @ weightᵀ in residual's place, or in a new one; None when this product is not in the table."""
        if x.dtype != torch.bfloat16:
            return None
        (rows, inputs), outputs = x.shape, len(weight)
        key = (x.device, Product(rows, inputs, outputs, stride=x.stride(0)))
        try:
            found = self._plans[key]
        except KeyError:
            found = self._plan(*key)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = found
        if found is None or not _as_measured(x, weight, residual):
            return None
        library, plan = found
        y = x.new_empty((rows, outputs)) if residual is None else residual
        library.multiply(plan, x, weight, residual, y)
        return y

    def _plan(self, device: torch.device, product: Product) -> tuple[Blas, Plan] | None:
        opened = self._library(device)
        if opened is None:
            return None
        library, algorithms = opened
        algorithm = find(algorithms, product.outputs, product.inputs, product.rows)
        if algorithm is None:
            return None
        try:
            return library, library.plan(product, algorithm)
        except Refused as problem:
            log.info("a product of many rows is torch's: %s", problem)
            return None

    def _library(self, device: torch.device) -> tuple[Blas, Algorithms] | None:
        if device not in self._libraries:
            self._libraries[device] = _opened(device)
        return self._libraries[device]


def _as_measured(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether operands are aligned and laid out as the algorithms need them."""
    if x.stride(1) != 1 or (x.stride(0) * x.itemsize) % ALIGNMENT or not weight.is_contiguous():
        return False
    held = (x, weight) if residual is None else (x, weight, residual)
    return all(t.data_ptr() % ALIGNMENT == 0 for t in held) and (residual is None or residual.is_contiguous())


def measured(table: str, outputs: int, inputs: int, rows: int) -> str:
    """What a table of tuned numbers has for a product, in words."""
    made = []
    for version, algorithms in tables()[table].algorithms.items():
        found = find(algorithms, outputs, inputs, rows)
        made.append(f"{table}, cublasLt {version}: {found or 'torch chooses as well'}")
    return "; ".join(made) or f"{table} has no algorithms of products: torch chooses"


def _opened(device: torch.device) -> tuple[Blas, Algorithms] | None:
    """The library on a GPU whose table has algorithms of this version of it, and those; else None."""
    if device.type != "cuda":
        return None
    by_version = tables()[tuned(device)].algorithms
    if not by_version:
        return None
    library = open_library(device)
    if library is None:
        return None
    if library.version not in by_version:
        held = ", ".join(map(str, by_version))
        log.info("products of many rows are torch's: cublasLt %d, measured was %s", library.version, held)
        return None
    return library, by_version[library.version]
