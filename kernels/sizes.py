"""Sizes of grids and tiles, for the host.

Triton's functions of these names are for kernels as well, and take 6 µs a call here: a step of many tokens, whose
launches nobody has put into a graph, calls them a thousand times.
"""

from __future__ import annotations


def cdiv(n: int, d: int) -> int:
    """n / d rounded up, d > 0."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is n or more, 1 at least."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
