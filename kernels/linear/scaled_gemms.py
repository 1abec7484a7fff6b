"""Products of many rows of 8-bit floats by cublasLt, with the residual added where the result is written: torch's
`_scaled_mm` has no place for one."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from kernels.linear.blas import ALIGNMENT, Blas, Plan, Product, open_library
from kernels.linear.tuned_gemms import MAX_PLANS
from kernels.weight import Fp8

log = logging.getLogger(__name__)


class ScaledProducts:
    """Multiplies by the library's own choice of an algorithm. Its plans and scratch memory are an engine's own."""

    def __init__(self) -> None:
        self._libraries: dict[torch.device, Blas | None] = {}
        self._plans: dict[tuple[torch.device, Product], Plan | None] = {}

    def multiply(
        self, x: torch.Tensor, scales: torch.Tensor, weight: Fp8, residual: torch.Tensor | None, fast: bool
    ) -> torch.Tensor | None:
        """residual + x @ weightᵀ in residual's place, or in a new bfloat16 tensor; None where the library has no
        such product.

        x [T, K] numbers with scales [T, 1], or [T, K / 128] whose groups stand one behind another. residual [T, N].
        fast: sums stay in the tensor cores, for scales by rows alone (`kernels.linear.blas.Product`).
        """
        kind: Literal["rows", "blocks"] = "rows" if scales.shape[1] == 1 else "blocks"
        (rows, inputs), outputs = x.shape, len(weight.data)
        product = Product(rows, inputs, outputs, inputs, x.dtype, kind, fast)
        key = (x.device, product)
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(*key)
        plan, library = self._plans[key], self._libraries[x.device]
        if plan is None or library is None or not _aligned(x, weight.data, residual):
            return None
        y = residual if residual is not None else x.new_empty((rows, outputs), dtype=product.result)
        library.multiply(plan, x, weight.data, residual, y, (weight.scale, scales))
        return y

    def _plan(self, device: torch.device, product: Product) -> Plan | None:
        if device not in self._libraries:
            self._libraries[device] = open_library(device)
        library = self._libraries[device]
        try:
            found = [] if library is None else library.heuristic(product, 1)
        except RuntimeError as problem:
            log.info("a product of 8-bit floats is torch's: %s", problem)
            return None
        return found[0] if found else None


def _aligned(*held: torch.Tensor | None) -> bool:
    return all(t is None or (t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0) for t in held)
