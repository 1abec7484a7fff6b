"""Products of many rows of 8-bit floats by the library: which it is asked for, with what, and what else is done.

Their numbers are held by the cases of `linear` and `gated_mlp` on a GPU (test_ops.py); a stand-in for the library shows
what reaches it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.linear import fp8_library, scaled_gemms
from kernels.linear.blas import Product
from kernels.linear.fp8_library import in_library, library_product, rows_of
from kernels.linear.scaled_gemms import ScaledProducts
from kernels.testing import randn, seeded
from kernels.weight import Fp8
from kernels.weight.inputs import Inputs, quantize
from kernels.workspace import Workspace

CPU, BF16, BLOCK = torch.device("cpu"), torch.bfloat16, (128, 128)
ROWS, BLOCKS = Inputs("fp8"), Inputs("fp8", 128)


class StandIn:
    """Multiplies as the definition says and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Product] = []
        self.refuses = False

    def heuristic(self, product: Product, count: int) -> list[SimpleNamespace]:
        if self.refuses:
            raise RuntimeError("cublasLtMatmulAlgoGetHeuristic gave status 15")
        self.asked.append(product)
        return [SimpleNamespace()]

    def multiply(self, plan: Any, x: torch.Tensor, weight: torch.Tensor, residual: Any, y: torch.Tensor,
                 scales: tuple[torch.Tensor, torch.Tensor]) -> None:  # fmt: skip
        of_weight, of_x = scales
        group, block = (128, BLOCK) if of_x.shape[1] > 1 else (x.shape[1], (1, x.shape[1]))
        wide = Fp8(weight, of_weight, block, Inputs()).dense(torch.float32)
        made = (x.float() * of_x.repeat_interleave(group, dim=1)) @ wide.t()
        y.copy_(made if residual is None else residual.float() + made)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(scaled_gemms, "open_library", lambda device: made)
    return made


def operands(inputs: Inputs, rows: int = 80, n: int = 128, k: int = 512) -> tuple[torch.Tensor, torch.Tensor, Fp8]:
    g = seeded(CPU)
    block = BLOCK if inputs.group else (1, k)
    scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=g) * 0.01
    weight = Fp8(randn(g, CPU, torch.float32, n, k).to(torch.float8_e4m3fn), scale, block, inputs)
    numbers, scales = quantize(randn(g, CPU, BF16, rows, k), inputs)
    return numbers, scales, weight


def wanted(numbers: torch.Tensor, scales: torch.Tensor, weight: Fp8) -> torch.Tensor:
    wide = numbers.float() * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], dim=1)
    return wide @ weight.dense(torch.float32).t()


@pytest.mark.parametrize("inputs", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("fast", [False, True])
def test_scales_by_rows_alone_are_added_up_fast(inputs: Inputs, fast: bool, library: StandIn) -> None:
    numbers, scales, weight = operands(inputs)
    y = library_product(Workspace(CPU, fast_sums=fast), numbers, scales, weight, None, None, len(numbers))
    torch.testing.assert_close(y.float(), wanted(numbers, scales, weight), rtol=1e-2, atol=1e-2)
    (asked,) = library.asked
    assert asked.scales == ("blocks" if inputs.group else "rows")
    assert asked.fast == (fast and not inputs.group)
    assert asked.result == BF16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [80, 77])
def test_the_residual_is_added_once(rows: int, bias: bool, library: StandIn) -> None:
    """Inside where it has all of the product's rows and there is no bias, else behind it; in its place either way."""
    numbers, scales, weight = operands(BLOCKS)
    residual = torch.randn(rows, 128).bfloat16()
    added = torch.ones(128, dtype=BF16) if bias else None
    want = residual.float() + wanted(numbers, scales, weight)[:rows] + int(bias)
    y = library_product(Workspace(CPU), numbers, scales, weight, added, residual, rows)
    assert y.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)


def test_what_the_library_refuses_is_left_to_torch(library: StandIn) -> None:
    library.refuses = True
    assert ScaledProducts().multiply(*operands(ROWS), None, False) is None


def test_a_residual_of_strided_rows_is_not_added_inside(library: StandIn) -> None:
    residual = torch.zeros(80, 256, dtype=BF16)[:, :128]
    assert ScaledProducts().multiply(*operands(ROWS), residual, False) is None


def test_which_weights_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_library, "group_products", lambda device: True)
    _, _, by_rows = operands(ROWS)
    _, _, by_blocks = operands(BLOCKS)
    assert in_library(by_rows, BF16)
    assert in_library(by_blocks, BF16)
    assert not in_library(by_rows, torch.float16)
    assert (rows_of(by_rows), rows_of(by_blocks)) == (1, 16)


@pytest.mark.parametrize("k", [128, 896, 640])
def test_scales_of_blocks_that_are_no_multiple_of_four_a_row_are_not_the_librarys(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads each row of them from a multiple of four on, and gives wrong numbers without a word."""
    monkeypatch.setattr(fp8_library, "group_products", lambda device: True)
    assert not in_library(operands(BLOCKS, k=k)[2], BF16)
