"""How many inputs of a row share a scale. No torch."""

from __future__ import annotations

from engine.models.reader import Reader

# Of a tile of kernels.linear.packed_rows: groups divide it, or are whole multiples of it.
TILE, LEAST = 128, 16


def group_size(reader: Reader, key: str) -> int:
    """The value of `key`; −1, for all inputs of a row, is given as 0. Raises ConfigError for one without a kernel."""
    group = reader.read(int, key)
    fits = group == -1 or (group >= LEAST and (TILE % group == 0 if group < TILE else group % TILE == 0))
    reader.check(fits, f"{key} = {group} is not implemented; implemented: -1, 16, 32, 64 and multiples of 128")
    return max(group, 0)
