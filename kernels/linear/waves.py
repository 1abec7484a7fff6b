"""How well tiles of a product of many rows share out over a GPU."""

from __future__ import annotations

# Rows and outputs of a tile; behind an activation, as many of gate and as many of up.
ROWS, OUTPUTS = 128, 128


def filled(rows: int, outputs: int, programs: int) -> float:
    """Which part of all programs' time is spent on outputs, when the busiest has one tile a wave."""
    waves = -(-(-(-rows // ROWS) * -(-outputs // OUTPUTS)) // programs)
    return rows * outputs / (waves * programs * ROWS * OUTPUTS)
