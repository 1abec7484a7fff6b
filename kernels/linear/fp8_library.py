"""Products of many rows of 8-bit floats by cuBLAS: the product, and the two of a gated feed-forward part with one
launch between them."""

from __future__ import annotations

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.hardware import group_products
from kernels.linear.fp8_rows import GROUP
from kernels.quantize.kernel import quantized
from kernels.weight import Fp8, Weight
from kernels.workspace import Workspace

# With scales by groups the library wants a multiple of so many rows.
ROW_MULTIPLE = 16
# It reads rows of a weight's scales by blocks at multiples of so many of them.
SCALE_MULTIPLE = 4


def in_library(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether cuBLAS has a product of quantized inputs with this weight, and a result of `dtype`."""
    if not isinstance(weight, Fp8):
        return False
    (n, k), number = weight.data.shape, weight.inputs
    if number.number is None or k % 16 or n % 16 or dtype != torch.bfloat16 or not group_products(weight.data.device):
        return False
    if weight.block == (1, k):
        return not number.group
    blocks = weight.block == (GROUP, GROUP) and number.group == GROUP
    return blocks and k % (SCALE_MULTIPLE * GROUP) == 0 and n % GROUP == 0


def rows_of(weight: Fp8) -> int:
    """What rows of inputs are filled up to a multiple of."""
    return ROW_MULTIPLE if weight.inputs.group else 1


def library_product(
    workspace: Workspace,
    x: torch.Tensor,
    scales: torch.Tensor,
    weight: Fp8,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """residual + x @ weightᵀ + bias of the first `rows` rows of numbers x, whose scales may stand a group behind
    another: [rows, N] in bfloat16. y may stand in residual's place."""
    inside = bias is None and residual is not None and len(residual) == len(x) and residual.is_contiguous()
    fast = workspace.fast_sums and scales.shape[1] == 1
    product = None
    if workspace.scaled_products is not None:
        product = workspace.scaled_products.multiply(x, scales, weight, residual if inside else None, fast)
        if product is not None and inside:
            return product
    if product is None:
        product = torch._scaled_mm(
            x, weight.data.t(), scales, weight.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    product = product[:rows]
    product = product if bias is None else product + bias
    return product if residual is None else residual.add_(product)


def library_linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Fp8,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """`kernels.linear.kernel.linear` with inputs that are not normed or quantized yet."""
    numbers, scales = quantized(workspace, x, weight.inputs, norm_weight, eps, offset, rows_of=rows_of(weight))
    y = library_product(workspace, numbers, scales, weight, bias, residual, len(x))
    return y if activation is None else gated_activation(workspace, y, activation)
