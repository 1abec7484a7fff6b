"""Draw a schedule of faults from a seed; write it as one line and read it back, so that any storm can be had again."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

_FAULT = re.compile(
    r"(?P<at>\d+(?:\.\d+)?) (?P<kind>[a-z0-9-]+) (?P<replica>\d)(?: pick (?P<pick>\d+))?"
    r"(?: for (?P<hold>\d+(?:\.\d+)?))?(?: x(?P<times>\d+))?"
)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    at_s: seconds after the storm's start. replica: the tritonserver it happens to. pick: which of several processes or
    bodies, modulo their number. hold_s: how long it lasts. times: how often a kill is repeated, each time on the
    process that took the killed one's place, as soon as it appears.
    """

    at_s: float
    kind: str
    replica: int = 0
    pick: int = 0
    hold_s: float = 0.0
    times: int = 1

    def __str__(self) -> str:
        parts = [f"{self.at_s:g} {self.kind} {self.replica}"]
        parts += [f"pick {self.pick}"] if self.pick else []
        parts += [f"for {self.hold_s:g}"] if self.hold_s else []
        parts += [f"x{self.times}"] if self.times > 1 else []
        return " ".join(parts)


@dataclass(frozen=True)
class Shape:
    """How faults of one kind are drawn. weight: how often beside others. hold_s, times: the range of each, both ends
    included. ends: it comes last in a schedule, for what it costs to come back from it."""

    weight: float = 1.0
    hold_s: tuple[float, float] = (0.0, 0.0)
    times: tuple[int, int] = (1, 1)
    ends: bool = False


@dataclass(frozen=True)
class Schedule:
    """seed: of the clients' choices too. seconds: how long the clients run."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"seed {self.seed} for {self.seconds:g}", *map(str, self.faults)])


def parse(line: str) -> Schedule:
    """A schedule out of what `str` made of it. Raises ValueError with the part that cannot be read."""
    head, *rest = [part.strip() for part in line.split(";")]
    began = re.fullmatch(r"seed (\d+) for (\d+(?:\.\d+)?)", head)
    if began is None:
        raise ValueError(f"{head!r} is not `seed NUMBER for SECONDS`")
    faults = []
    for part in rest:
        found = _FAULT.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is not `AT KIND REPLICA [pick N] [for SECONDS] [xTIMES]`")
        faults.append(
            Fault(
                float(found["at"]),
                found["kind"],
                int(found["replica"]),
                int(found["pick"] or 0),
                float(found["hold"] or 0),
                int(found["times"] or 1),
            )
        )
    return Schedule(int(began[1]), float(began[2]), tuple(faults))


def draw(seed: int, seconds: float, shapes: Mapping[str, Shape], gap_s: tuple[float, float] = (2.0, 6.0)) -> Schedule:
    """Faults at random gaps, each after the one before has been let go, until `seconds` less a quiet end.

    gap_s: least and most seconds between the end of a fault and the next.
    """
    chance = random.Random(seed)
    common = {kind: shape for kind, shape in shapes.items() if not shape.ends}
    last = {kind: shape for kind, shape in shapes.items() if shape.ends}
    faults: list[Fault] = []
    at_s = chance.uniform(*gap_s)
    while at_s < seconds - gap_s[1]:
        fault = _fault(chance, at_s, common)
        faults.append(fault)
        at_s = fault.at_s + fault.hold_s + chance.uniform(*gap_s)
    if last:
        faults.append(_fault(chance, max(at_s, seconds - gap_s[1]), last))
    return Schedule(seed, seconds, tuple(faults))


def _fault(chance: random.Random, at_s: float, shapes: Mapping[str, Shape]) -> Fault:
    kinds = sorted(shapes)
    (kind,) = chance.choices(kinds, [shapes[kind].weight for kind in kinds])
    shape = shapes[kind]
    return Fault(
        at_s=round(at_s, 1),
        kind=kind,
        replica=chance.randrange(2),
        pick=chance.randrange(32),
        hold_s=round(chance.uniform(*shape.hold_s), 1),
        times=chance.randint(*shape.times),
    )


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], most_runs: int = 24) -> Schedule:
    """The smallest part of a failing schedule that still fails: delta debugging over its faults (Zeller and
    Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002), then fewer repetitions.

    fails: runs a schedule; true when it breaks what the whole one breaks. most_runs: how often it may be called.
    """
    runs = 0

    def breaks(faults: Sequence[Fault], most: int = most_runs) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most and fails(replace(schedule, faults=tuple(faults)))

    if breaks(()):
        return replace(schedule, faults=())
    faults, parts = list(schedule.faults), 2
    while len(faults) > 1 and runs < most_runs:
        size = -(-len(faults) // parts)
        chunks = [faults[start : start + size] for start in range(0, len(faults), size)]
        rests = [[f for f in faults if f not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((part for part in [*chunks, *rests] if breaks(part)), None)
        if smaller is not None:
            parts = max(2, parts - 1) if len(smaller) > size else 2
            faults = smaller
        elif size == 1:
            break
        else:
            parts = min(len(faults), 2 * parts)
    for place, fault in enumerate(faults):
        while fault.times > 1:
            fewer = replace(fault, times=fault.times - 1)
            if not breaks([*faults[:place], fewer, *faults[place + 1 :]]):
                break
            fault = faults[place] = fewer
    return replace(schedule, faults=tuple(faults))
