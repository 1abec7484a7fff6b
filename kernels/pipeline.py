"""How deep a loop's pipeline may be, and how large a tile of attention, where blocks have little shared memory.

Triton keeps stages − 1 copies of what a round of the loop loads for its products in shared memory, one of them without
a pipeline as well, beside what stays there for as long as the loop runs. Sizes here are bytes, and `shared` those that
a block may have (`kernels.hardware.shared_bytes`). Cuts were tuned where that is more than `MIN_SHARED`, and every
case was compiled there: they stay what they are, whatever an estimate says. `python -m kernels.compile_all` holds the
estimates for other GPUs to what the compiler takes.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.hardware import MIN_SHARED

# Of tiles of attention: keys that are given up before rows are, and what tensor cores take at least.
FEW_KEYS, MIN_SIDE = 32, 16


def fits(stages: int, loaded: int, shared: int, beside: int = 0) -> bool:
    """Whether a loop of that depth fits. loaded: in a round."""
    return shared > MIN_SHARED or max(stages - 1, 1) * loaded + beside <= shared


def fitting_stages(stages: int, loaded: int, shared: int, beside: int = 0) -> int:
    """The depth of a pipeline: `stages`, or as many as fit. Results do not depend on it. Two at least, which take no
    more than one: where those do not fit, the tile is too large."""
    while stages > 2 and not fits(stages, loaded, shared, beside):
        stages -= 1
    return stages


class AttentionTile(NamedTuple):
    """Rows of queries and keys of a tile, and the depth of the loop over keys."""

    rows: int
    keys: int
    stages: int


def fitting_attention(
    tile: AttentionTile, key: int, row: int, weight: int, shared: int, fewest: int = MIN_SIDE
) -> AttentionTile:
    """The tile, or the largest below it that fits.

    key: bytes of a key and its value. row: of what stays of a row. weight: of a row's weight of a key, 0 where weights
    stay in registers. fewest: rows that a tile may not go below. Numbers of keys and rows are halved.

    Half the keys at the same depth have as many bytes on their way as one stage less where there are three, and the
    loop still loads while it multiplies.
    """
    rows, keys, stages = tile

    def fit(depth: int) -> bool:
        return fits(depth, keys * key, shared, rows * (row + keys * weight))

    while keys > FEW_KEYS and not fit(stages):
        keys //= 2
    while rows > fewest and not fit(stages):
        rows //= 2
    while stages > 2 and not fit(stages):
        stages -= 1
    while keys > MIN_SIDE and not fit(stages):
        keys //= 2
    return AttentionTile(rows, keys, stages)
