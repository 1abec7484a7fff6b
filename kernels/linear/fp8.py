"""Products with weights of 8-bit floats or integers: numbers of both sides are multiplied, sums of 128 inputs are
scaled and added up in float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

Inputs are quantized by one launch, which has the norm before them inside. Few rows take one kernel with bias,
activation and residual inside: a Triton kernel, or on Hopper above 16 rows a Gluon kernel (`quantized_stream`). Many
rows of floats go to cuBLAS.
"""

from __future__ import annotations

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.hardware import group_products
from kernels.linear.fp8_rows import GROUP, RowTile, fp8_linear
from kernels.linear.quantized_stream import fp8_stream, streams_fp8
from kernels.linear.skinny import counters
from kernels.linear.stream import StreamTile
from kernels.quantize.kernel import quantized
from kernels.rms_norm.kernel import rms_norm
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Fp8, Int8
from kernels.workspace import Workspace

# Up to these, rows take a split of the inputs, stream through shared memory, take one tile of rows.
SPLIT_ROWS, FEW_ROWS, LIBRARY_ROWS = 16, 64, 256
# One for each multiprocessor of a Hopper GPU.
PROGRAMS = 132


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: Fp8 | Int8,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See `kernels.linear.kernel`. y may stand in residual's place."""
    rows, dtype = len(x), x.dtype
    n = weight.data.shape[0] // (2 if activation else 1)
    if not rows:
        return x.new_zeros((0, n))
    library = rows > FEW_ROWS and not deterministic and _in_library(weight, dtype)
    scales = None
    if weight.inputs.number is not None:
        # The library wants whole lines of 16 rows.
        x, scales = quantized(workspace, x, weight.inputs, norm_weight, eps, offset, 16 if library else 1)
    elif norm_weight is not None:
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
    if library and scales is not None:
        product = torch._scaled_mm(x, weight.data.t(), scales, weight.scale.t(), out_dtype=dtype)[:rows]
        product = product if bias is None else product + bias
        if activation is not None:
            return gated_activation(workspace, product, activation)
        return product if residual is None else residual.add_(product)
    few = rows <= SPLIT_ROWS or deterministic
    if not few and scales is not None and isinstance(weight, Fp8) and streams_fp8(x, weight):
        stream = stream_tile(rows, activation is not None)
        counts = counters(workspace)
        return fp8_stream(workspace, x, scales, weight, bias, residual, activation, stream, counts, dtype)
    y = torch.empty(rows, n, dtype=dtype, device=x.device) if residual is None else residual
    tile = row_tile(rows, n, x.shape[1], activation is not None, deterministic)
    fp8_linear(workspace, x, scales, weight, bias, residual, y, activation, tile)
    return y


def stream_tile(rows: int, activation: bool) -> StreamTile:
    """One program a multiprocessor, with a ring as deep as its shared memory allows (measured on an H200)."""
    height = 32 if rows <= 32 else FEW_ROWS
    if activation:
        return StreamTile(height, 64, GROUP, 6)
    return StreamTile(height, 64, 2 * GROUP, 6 if height == 32 else 4)


def row_tile(rows: int, n: int, k: int, activation: bool, deterministic: bool) -> RowTile:
    """About one program a multiprocessor for up to 16 rows, two of half the outputs for more (measured on an H200).

    deterministic: one cut whatever rows there are.
    """
    if deterministic:
        return RowTile(FEW_ROWS, 64, 2 if n <= 1 << 13 and not activation else 1, 4)
    height = min(FEW_ROWS, max(16, next_power_of_2(rows)))
    if rows > LIBRARY_ROWS:
        return RowTile(128, 64 if activation else 128, 1, 3, 8)
    if activation or n >= 1 << 16 or rows > FEW_ROWS:
        return RowTile(height, 128 if height == 16 else 64, 1, 4)
    outputs, programs = (128, PROGRAMS) if height == 16 else (64, 2 * PROGRAMS)
    split = max(1, min(programs // cdiv(n, outputs), k // (4 * GROUP)))
    return RowTile(height, outputs, split, 7 if height == 16 else 4)


def _in_library(weight: Fp8 | Int8, dtype: torch.dtype) -> bool:
    """Whether cuBLAS has a product of quantized inputs with this weight."""
    if not isinstance(weight, Fp8):
        return False
    (n, k), number = weight.data.shape, weight.inputs
    if number.number is None or k % 16 or n % 16 or dtype != torch.bfloat16 or not group_products(weight.data.device):
        return False
    if weight.block == (1, k):
        return not number.group
    return weight.block == (GROUP, GROUP) and number.group == GROUP and k % GROUP == 0 and n % GROUP == 0
