"""Products with blocks of GGUF files. Few rows read them packed; for many the numbers are written out once, and the
dense product takes them. Each run of rows in a format of its own has a launch of its own."""

from __future__ import annotations

import torch

from kernels.gated_activation.kernel import gated_activation
from kernels.linear import dense
from kernels.linear.gguf_rows import rows_product, write_numbers
from kernels.linear.packed_dispatch import FEW_ROWS, row_tile
from kernels.rms_norm.kernel import rms_norm
from kernels.weight import Dense, GgufBlocks
from kernels.workspace import Workspace


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: GgufBlocks,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See `kernels.linear.kernel`. y may stand in residual's place."""
    rows, n = len(x), weight.shape[0] // (2 if activation else 1)
    if not rows:
        return x.new_zeros((0, n))
    if norm_weight is not None:
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
    if rows > FEW_ROWS and not deterministic:
        whole = Dense(unpacked(workspace, weight, x.dtype))
        return dense.linear(workspace, x, whole, bias, residual=residual, activation=activation)
    if activation and len(weight.parts) > 1:
        both = linear(workspace, x, weight, bias, deterministic=deterministic)
        return gated_activation(workspace, both, activation)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    start = 0
    for part, name in zip(weight.parts, weight.formats, strict=True):
        stop = start + (n if activation else len(part))
        tile = row_tile(rows, stop - start, x.shape[1], activation is not None, deterministic)
        own = bias if bias is None or activation else bias[start:stop]
        left = None if residual is None else residual[:, start:stop]
        rows_product(workspace, x, part, name, own, left, y[:, start:stop], activation, tile)
        start = stop
    return y


def unpacked(workspace: Workspace, weight: GgufBlocks, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [N, K] of a matrix in `dtype`."""
    w = torch.empty(weight.shape, dtype=dtype, device=weight.parts[0].device)
    start = 0
    for part, name in zip(weight.parts, weight.formats, strict=True):
        write_numbers(workspace, part, name, w[start : start + len(part)])
        start += len(part)
    return w
