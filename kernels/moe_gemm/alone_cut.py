"""How products of few pairs with quantized experts on Hopper are cut, where each pair is a tile: programs that share a
tile's inputs, and stages of their rings. Tokens count as the next power of two, so that the steps that compile kernels
ahead meet every cut."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.hopper.schedule import SHARED_BYTES
from kernels.linear import quantized_row
from kernels.sizes import cdiv, next_power_of_2

# Inputs of a block and of a stage of a ring, and rows of a matrix that a tile has.
WIDTH, UNIT, HEIGHT = 128, 256, 64
# Pairs up to which each is a tile.
ALONE_PAIRS = 32
# Programs of a multiprocessor and of a tile, at most; units of a program that shares its tile, at least.
PROGRAMS, MAX_SPLITS, UNITS = 4, 4, 4
# Of packed numbers: stages with which so many programs of a tile of one pair share a multiprocessor, by shared memory.
RESIDENT, FEW_STAGES = ((6, 3), (4, 4)), 3
# Of 8-bit floats: columns of the matrix instructions' second operand. Blocks of a row that stand there have their
# numbers and a scale for each column in shared memory. The rest is the system's, barriers and what sums pass through.
COLUMNS = quantized_row.COLUMNS.value
STAGE_BYTES, ROW_BYTES, RESERVED_BYTES = HEIGHT * UNIT, WIDTH + 4 * COLUMNS, 1024 + 512


@dataclass(frozen=True, slots=True)
class AloneCut:
    """How many programs share a tile's units, and stages of their rings."""

    splits: int
    stages: int

    def held(self, inputs: int) -> int:
        """A power of two that the blocks of a program's units fit in, and whole columns."""
        return max(COLUMNS, next_power_of_2(UNIT // WIDTH * cdiv(cdiv(inputs, UNIT), self.splits)))


def packed_cut(columns: int, tokens: int, k: int, units: int, multiprocessors: int) -> AloneCut:
    """Of packed numbers, for k pairs a token and that many columns of tiles a pair. As many stages as let all programs
    be resident at once, else as few as keep bytes in flight."""
    programs = columns * next_power_of_2(tokens) * k
    splits = _splits(programs, units, multiprocessors)
    fitting = (stages for stages, each in RESIDENT if programs * splits <= each * multiprocessors)
    return AloneCut(splits, min(next(fitting, FEW_STAGES), cdiv(units, splits)))


def fp8_cut(columns: int, tokens: int, k: int, inputs: int, scales: int, multiprocessors: int) -> AloneCut:
    """Of 8-bit floats, as `packed_cut`; scales: those of a block of a tile's weights. As many programs as a
    multiprocessor gets and leaves FEW_STAGES, or all units of a program; the stages that shared memory has room for."""
    programs, units = columns * next_power_of_2(tokens) * k, cdiv(inputs, UNIT)
    splits = _splits(programs, units, multiprocessors)
    beside = RESERVED_BYTES + AloneCut(splits, 1).held(inputs) * (ROW_BYTES + 4 * scales)
    longest = cdiv(units, splits)
    resident = range(min(PROGRAMS, cdiv(programs * splits, multiprocessors)), 0, -1)
    rings = [min(longest, (SHARED_BYTES // each - beside) // STAGE_BYTES) for each in resident]
    return AloneCut(splits, next(stages for stages in rings if stages >= min(FEW_STAGES, longest)))


def _splits(programs: int, units: int, multiprocessors: int) -> int:
    return max(1, min(units // UNITS, MAX_SPLITS, PROGRAMS * multiprocessors // programs))
