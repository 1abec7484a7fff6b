"""Products of many rows with algorithms of cublasLt that were measured to be faster than the library's own choice.

`algorithms.json` names them by GPU, version of the library, sizes of the weight and rows of the step; `perf.tune.blas`
writes it. Anything else, and whatever the library refuses, is left to torch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from kernels.linear.blas import ALIGNMENT, Algorithm, Blas, Plan, Product, Refused

log = logging.getLogger(__name__)

TABLE = Path(__file__).with_name("algorithms.json")
# Steps of few tokens are padded to sizes that are in the table, those of many have any size: from here on they take the
# next size's, or the largest's. With 6,000 and with 16,448 rows that was faster than torch's choice; at 3,000, with the
# algorithms of 4,096, it was not.
LONG_ROWS = 6000
# Sizes of products that are remembered: steps without a graph have any number of rows.
MAX_PLANS = 4096


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on one kind of GPU with one version of the library.

    algorithms: (outputs, inputs) → rows → the fastest, or None where torch's is as fast.
    """

    gpu: str
    version: int
    algorithms: dict[tuple[int, int], dict[int, Algorithm | None]]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Raises ValueError when the file is no such table."""
        held = json.loads(path.read_text())
        made = {}
        for sizes, by_rows in held["products"].items():
            outputs, inputs = map(int, sizes.split("x"))
            made[outputs, inputs] = {int(n): None if a is None else Algorithm(*a) for n, a in by_rows.items()}
        return cls(held["gpu"], held["version"], made)

    def find(self, outputs: int, inputs: int, rows: int) -> Algorithm | None:
        """What these sizes take; long products take what the next number of rows that was measured takes, or the
        largest."""
        by_rows = self.algorithms.get((outputs, inputs), {})
        if rows >= LONG_ROWS:
            measured = [n for n in by_rows if n >= LONG_ROWS]
            rows = min((n for n in measured if n >= rows), default=max(measured, default=rows))
        return by_rows.get(rows)


class Products:
    """Multiplies by the algorithms of the table. Its plans and the library's scratch memory are an engine's own."""

    def __init__(self) -> None:
        self._libraries: dict[torch.device, Blas | None] = {}
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
        algorithm = _table().find(product.outputs, product.inputs, product.rows)
        library = self._library(device)
        if library is None or algorithm is None:
            return None
        try:
            return library, library.plan(product, algorithm)
        except Refused as problem:
            log.info("a product of many rows is torch's: %s", problem)
            return None

    def _library(self, device: torch.device) -> Blas | None:
        if device not in self._libraries:
            self._libraries[device] = _opened(device)
        return self._libraries[device]


def _as_measured(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether operands are aligned and laid out as the algorithms need them."""
    if x.stride(1) != 1 or (x.stride(0) * x.itemsize) % ALIGNMENT or not weight.is_contiguous():
        return False
    held = (x, weight) if residual is None else (x, weight, residual)
    return all(t.data_ptr() % ALIGNMENT == 0 for t in held) and (residual is None or residual.is_contiguous())


def measured(outputs: int, inputs: int, rows: int) -> str:
    """What the table has for a product, in words."""
    table = _table()
    where = f"{table.gpu}, cublasLt {table.version}"
    found = table.find(outputs, inputs, rows)
    return f"no algorithm of its own on {where}: torch's choice" if found is None else f"on {where}: {found}"


@lru_cache(maxsize=1)
def _table() -> Table:
    return Table.read(TABLE)


def _opened(device: torch.device) -> Blas | None:
    """The library on a GPU of the kind that the table was measured on, else None."""
    table = _table()
    if device.type != "cuda" or torch.cuda.get_device_name(device) != table.gpu:
        return None
    try:
        library = Blas(device)
    except (OSError, AttributeError, RuntimeError) as problem:
        log.info("products of many rows are torch's: cublasLt is not to be had (%s)", problem)
        return None
    if library.version != table.version:
        log.info("products of many rows are torch's: cublasLt %d, measured was %d", library.version, table.version)
        return None
    return library
