"""Storm after storm for some minutes, each drawn from a seed; a storm that breaks a promise is shrunk and printed.

python -m tests.chaos --minutes 30 --seed 1
python -m tests.chaos --replay "seed 1 for 20; 3 kill-engine 0 x3"
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tests.chaos import storm
from tests.chaos.clients import undisturbed
from tests.chaos.faults import KINDS
from tests.chaos.fleet import Fleet
from tests.chaos.schedule import Schedule, Shape, draw, parse, shrink

_STORM_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first storm; drawn when it is not given")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--replay", help="a schedule, as it was printed")
    parser.add_argument("--only", nargs="*", choices=sorted(KINDS), help="kinds of faults to draw from")
    parser.add_argument("--without", nargs="*", default=(), choices=sorted(KINDS), help="kinds to leave out")
    parser.add_argument("--streams", type=int, default=storm.STREAMS)
    parser.add_argument("--no-shrink", action="store_true", help="stop at a broken promise without shrinking it")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of a fleet that broke a promise")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the fleet ends with it
    if options.replay is not None:
        report = alone(parse(options.replay), options.streams, options.keep)
        return 1 if report.violations else 0
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    shapes = drawn(options.only, options.without)
    end = time.monotonic() + 60 * options.minutes
    print(f"SEED={seed} MINUTES={options.minutes:g}: {', '.join(shapes)}", flush=True)
    with Fleet() as fleet:
        expected = undisturbed(fleet)
        while time.monotonic() < end:
            seconds = min(_STORM_S, max(20.0, end - time.monotonic()))
            report = storm.run(fleet, draw(seed, seconds, shapes), expected, options.streams)
            print(report, flush=True)
            if report.violations:
                _keep(fleet, options.keep)
                break
            seed += 1
        else:
            return 0
    if not options.no_shrink:
        rules = {violation.rule for violation in report.violations}
        least = shrink(report.schedule, lambda s: bool(rules & {v.rule for v in alone(s, options.streams).violations}))
        print(f"the smallest schedule that breaks it, for tests/chaos/found.py:\n{least}", flush=True)
    return 1


def drawn(only: Collection[str] | None, without: Collection[str] = ()) -> dict[str, Shape]:
    """Shapes of the kinds that are drawn."""
    kinds = only or [kind for kind, one in KINDS.items() if one.shape.weight > 0]
    return {kind: KINDS[kind].shape for kind in kinds if kind not in without}


def alone(schedule: Schedule, streams: int = storm.STREAMS, keep: Path | None = None) -> storm.Report:
    """A storm on a fleet of its own."""
    with Fleet() as fleet:
        report = storm.run(fleet, schedule, undisturbed(fleet), streams)
        if report.violations:
            _keep(fleet, keep)
    print(report, flush=True)
    return report


def _keep(fleet: Fleet, folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for part in (fleet.shim, *fleet.replicas):
            (folder / part.log_file.name).write_text(part.log())


if __name__ == "__main__":
    sys.exit(main())
