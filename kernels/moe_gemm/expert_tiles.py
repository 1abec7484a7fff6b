# mypy: disable-error-code="no-untyped-def,attr-defined"
"""What products of a decode step's pairs with quantized experts on Hopper have in common, whatever the numbers are:
where a tile's rows stand, how weights are asked for, what becomes of a tile's sums."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.compat import sync
from kernels.hopper.epilogue import activate, limited
from kernels.hopper.ring import load_gate_up
from kernels.moe_gemm import alone_cut
from kernels.weight import Fp4, Fp8, Int8, PackedInt
from kernels.workspace import Workspace

Quantized = Fp4 | Fp8 | Int8 | PackedInt
# Counters of arrivals of programs that share tiles: more than there are tiles of so few pairs.
ARRIVALS = 1 << 16


def whole_tiles(gate_up: Quantized, down: Quantized) -> bool:
    """Whether tiles divide rows and inputs of both tables, whose gate and up are as high."""
    (_, width, hidden), inter = gate_up.shape, down.shape[2]
    return bool(hidden % alone_cut.HEIGHT == 0 and inter % alone_cut.HEIGHT == 0 and width == 2 * inter)


def shared_tiles(
    workspace: Workspace, tiles: int, splits: int, height: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where programs that share tiles put their parts, and count themselves (`combine_splits`); None where none do."""
    if splits == 1:
        return None, None
    partials = torch.empty(tiles * splits * height, dtype=torch.float32, device=workspace.device)
    return partials, workspace.counters("splits of experts' products", ARRIVALS)


@gluon.constexpr_function
def pairs_layout(height, pairs):
    """Sums [height, pairs] of four warps: a thread has a row of gate and the row of up that belongs to it."""
    again = [[32, 0]] if height == 128 else []
    bits = [[0, 1 << bit] if 1 << bit < pairs else [0, 0] for bit in range(3)]
    more = [[0, 1 << bit] for bit in range(3, pairs.bit_length() - 1)]
    registers = [[1, 0], [height // 2, 0], *again, *more]
    return gl.DistributedLinearLayout(
        registers, [[2, 0], [4, 0], [8, 0], [16, 0], bits[0]], bits[1:], [], [height, pairs]
    )


@gluon.constexpr_function
def written_layout(warps):
    """That of outputs [outputs, pairs] when they are written."""
    return gl.BlockedLayout([4, 1], [16, 2], [1, warps], [0, 1])


@gluon.jit
def ask_unit(w_desc, bars, ring, stage, row, up_row, unit, live, GATED: gl.constexpr):
    """Asks for a unit of the weights, two blocks; its barrier may expect arrivals of a unit of x too."""
    HEIGHT: gl.constexpr = ring.shape[1]
    BK: gl.constexpr = ring.shape[2]
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * HEIGHT * BK, pred=live)
    for block in gl.static_range(2):
        box = ring.index(2 * stage + block)
        load_gate_up(w_desc, row, up_row, (2 * unit + block) * BK, bar, box, live, 2 if GATED else 1)


@gluon.jit
def pair_expert(chosen, pair, num_experts):
    """A pair's expert, and whether it is one of these."""
    expert = gl.load(chosen + pair, cache_modifier=".cg")
    return expert, (expert >= 0) & (expert < num_experts)


@gluon.jit
def matrix_row(column, r, outputs, OUT: gl.constexpr, GATED: gl.constexpr):
    """Where row r of a column's tile stands in its expert's matrix: behind the last row, the last one."""
    row = gl.minimum(column * OUT + r % OUT, outputs - 1)
    return row + r // OUT * outputs if GATED else row


@gluon.jit
def split_range(inputs, UNIT: gl.constexpr, SPLITS: gl.constexpr):
    """The program's number among those that share a tile, and its range of the tile's units of inputs."""
    split, begin, stop = 0, 0, (inputs + UNIT - 1) // UNIT
    if SPLITS > 1:
        split, units = gl.program_id(2), stop
        begin, stop = split * units // SPLITS, (split + 1) * units // SPLITS
    return split, begin, stop


@gluon.jit
def combine_splits(acc, partial_ptr, count_ptr, place, split, SPLITS: gl.constexpr):
    """Stores a program's part of tile `place`, whose columns are all the same pair's. Gives whether all others have
    stored theirs, and then the parts' sums, in the order of the inputs.

    partial_ptr has room for SPLITS columns of each tile, count_ptr a zero for each, which is zero again afterwards.
    """
    R: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    r = gl.arange(0, R, gl.SliceLayout(1, mma))
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, mma)), 0)
    parts = partial_ptr + place * SPLITS * R + r
    gl.store(gl.expand_dims(parts + split * R, 1) + column, acc, mask=(column == 0) & gl.expand_dims(r >= 0, 1))
    sync()
    last = gl.atomic_add(count_ptr + place, 1, sem="acq_rel") == SPLITS - 1
    if last:
        sums = gl.load(parts, cache_modifier=".cg")
        for other in gl.static_range(1, SPLITS):
            sums += gl.load(parts + other * R, cache_modifier=".cg")
        acc = gl.expand_dims(sums, 1) + gl.zeros((R, C), gl.float32, mma)
        gl.store(count_ptr + place, 0)
    return last, acc


@gluon.jit
def write_pairs(
    acc, column, expert, pair, weight, there, biases, y, outputs, expert_rows, limit,
    ACT: gl.constexpr, LIMITED: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """What follows a tile's sums acc [HEIGHT, C] of the first `there` of pairs [C], which stand in `written_layout`:
    bias; activation, or the pairs' weight without ACT; outputs."""
    GATED: gl.constexpr = ACT is not None
    HEIGHT: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    paired: gl.constexpr = pairs_layout(HEIGHT, C)
    flat: gl.constexpr = written_layout(gl.num_warps())
    out = gl.convert_layout(acc, paired)
    if BIASED:
        b = matrix_row(column, gl.arange(0, HEIGHT, gl.SliceLayout(1, paired)), outputs, OUT, GATED)
        out += gl.expand_dims(gl.load(biases + expert.to(gl.int64) * expert_rows + b).to(gl.float32), 1)
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(out, (2, OUT, C)), (1, 2, 0)))
        if LIMITED:
            gate, up = limited(gate, up, limit)
        if ACT == "swiglu_oai":
            out = gate / (1.0 + gl.exp(-1.702 * gate)) * (up + 1.0)
        else:
            out = activate(gate, ACT) * up
    out = gl.convert_layout(out, flat)
    if not GATED:
        out *= gl.expand_dims(weight, 0)
    n = column * OUT + gl.arange(0, OUT, gl.SliceLayout(1, flat))
    spot = y + gl.expand_dims(pair.to(gl.int64) * outputs, 0) + gl.expand_dims(n, 1)
    live = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, flat)) < there, 0) & gl.expand_dims(n < outputs, 1)
    gl.store(spot, out.to(y.dtype.element_ty), mask=live)
