"""Numbers with a fraction as llguidance reads them: digits as one integer, times or through a power of ten, where both
and the result are rounded to 64-bit floats. So 0.9171763132459553 becomes the float next to it.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

_NEAR = 16  # floats on either side that may stand for one that is not read as itself
_MAX_PLACES = 22


def kept(value: float) -> bool:
    """Whether it is read as itself, as those of 15 digits are."""
    _, digits, exponent = Decimal(str(float(value))).as_tuple()
    if not -308 <= int(exponent) <= 308:
        return False
    whole, power = float(int("".join(map(str, digits)))), float(f"1e{abs(int(exponent))}")
    return (whole * power if int(exponent) >= 0 else whole / power) == abs(float(value))


def within(bound: float, up: bool) -> float:
    """The nearest number that is read as itself, not below the bound, or not above it."""
    for _ in range(_NEAR):
        if kept(bound):
            return bound
        bound = math.nextafter(bound, math.inf if up else -math.inf)
    raise ValueError(f"a bound of {bound} is read as another number: write fewer digits")


def steps(step: float) -> list[float]:
    """What `multipleOf` has to be: any of these, so that numbers may end with their last digit that is not 0.

    With the first alone 0.5 as a multiple of 0.25 is `0.50`. Raises ValueError for a step that cannot be read exactly.
    """
    exact = abs(Decimal(str(step)))
    places = max(0, -int(exact.normalize().as_tuple().exponent))
    if places > _MAX_PLACES:
        raise ValueError(f"multipleOf {step}: at most {_MAX_PLACES} digits behind the point can be held to")
    counted, made = int(exact.scaleb(places)), []
    for left in range(places + 1):
        wanted = Decimal(math.lcm(counted, 10**left)).scaleb(-places)
        if wanted not in made:
            made.append(wanted)
    return [_read_as(each) for each in made]


def _read_as(step: Decimal) -> float:
    """The number that is read as this step: itself, or one next to it."""
    below = above = float(step)
    for _ in range(_NEAR):
        for near in (below, above):
            if kept(near) and _step(near) == step:
                return int(near) if near.is_integer() else near
        below, above = math.nextafter(below, -math.inf), math.nextafter(above, math.inf)
    raise ValueError(f"multipleOf {step}: so many digits behind the point cannot be held to")


def _step(near: float) -> Decimal | None:
    """A step is multiplied by 10 until nothing is behind its point; None where it never ends."""
    places = 0
    while math.isfinite(near) and not near.is_integer():
        near *= 10.0
        places += 1
    return Decimal(int(near)).scaleb(-places) if math.isfinite(near) and near < 1 << 32 else None


def check(value: Any, keyword: str) -> None:
    """Raises ValueError for a constant that is read as another."""
    if isinstance(value, float) and math.isfinite(value) and not kept(value):
        raise ValueError(f"{keyword} {value} is read as another number: write fewer digits, or make it a string")
