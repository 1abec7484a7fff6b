"""Products with weights of packed integers and of 4-bit floats. Few rows take one kernel that reads the weight packed,
with bias, activation and residual inside: a Gluon kernel on Hopper where it can (`quantized_stream`), else a Triton
kernel. For many rows the weight's numbers are written out once, and the dense product takes them: that costs one pass
over the weight, where the product has hundreds of operations a byte of it."""

from __future__ import annotations

import torch

from kernels.linear import dense
from kernels.linear.fp8 import PROGRAMS
from kernels.linear.fp8_rows import RowTile
from kernels.linear.packed_rows import WIDTH, packed_linear, unpacked
from kernels.linear.quantized_stream import MAX_ROWS, packed_stream, streams_packed
from kernels.linear.skinny import counters
from kernels.linear.stream import StreamTile
from kernels.rms_norm.kernel import rms_norm
from kernels.round_fp4.kernel import round_fp4
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight import Dense, Fp4, PackedInt
from kernels.workspace import Workspace

# Of one tile, and those up to which the weight is read packed.
TILE_ROWS, FEW_ROWS = 64, 256


def linear(
    workspace: Workspace,
    x: torch.Tensor,
    weight: PackedInt | Fp4,
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
    if isinstance(weight, Fp4) and weight.rounding.number is not None:
        x = round_fp4(workspace, x, weight.rounding, norm_weight, eps, offset)
    elif norm_weight is not None:
        x, _ = rms_norm(workspace, x, norm_weight, eps, offset=offset, deterministic=deterministic)
    if rows > FEW_ROWS and not deterministic:
        if isinstance(weight, PackedInt) and weight.order is not None:
            x = x.index_select(1, weight.order)
        whole = Dense(unpacked(workspace, weight, x.dtype))
        return dense.linear(workspace, x, whole, bias, residual=residual, activation=activation)
    if not deterministic and isinstance(weight, PackedInt) and streams_packed(x, weight):
        stream = stream_tile(rows, activation is not None)
        return packed_stream(workspace, x, weight, bias, residual, activation, stream, counters(workspace))
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    tile = row_tile(rows, n, x.shape[1], activation is not None, deterministic)
    packed_linear(workspace, x, weight, bias, residual, y, activation, tile)
    return y


def stream_tile(rows: int, activation: bool) -> StreamTile:
    """Two programs a multiprocessor, whose rings fill its shared memory: programs of the next product, started early,
    slow these down (measured on an H200)."""
    height = next(h for h in (8, 16, 32, MAX_ROWS) if rows <= h)
    if activation and height in (8, 32):
        return StreamTile(height, 64, WIDTH, 8 if height == 8 else 6, 2)
    stages = {8: 8, 16: 4 if activation else 6, 32: 4, MAX_ROWS: 2}
    return StreamTile(height, 64, 2 * WIDTH, stages[height], 2)


def row_tile(rows: int, n: int, k: int, activation: bool, deterministic: bool) -> RowTile:
    """About one program a multiprocessor for up to 16 rows, two for more. deterministic: one cut whatever rows there
    are."""
    if deterministic:
        return RowTile(TILE_ROWS, 64, 2 if n <= 1 << 13 and not activation else 1, 3)
    height = min(TILE_ROWS, max(16, next_power_of_2(rows)))
    if activation or n >= 1 << 16 or rows > TILE_ROWS:
        return RowTile(height, 64, 1, 3)
    programs = PROGRAMS if height == 16 else 2 * PROGRAMS
    split = max(1, min(programs // cdiv(n, 64), k // (4 * WIDTH)))
    return RowTile(height, 64, split, 4 if height == 16 else 3)
