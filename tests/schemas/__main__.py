"""python -m tests.schemas: random schemas and those that installed packages ship, each with answers and documents; what
came of it as a table. Ends with 1 where a promise broke."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from random import Random

from engine.demo.make import make
from tests.schemas.check import Checker, Found
from tests.schemas.generate import random_schema
from tests.schemas.shipped import shipped

DEMO_TOKENS, DEMO_EOS = 640, (0,)


def demo_checker(folder: Path) -> Checker:
    """Over the demo's tokens; `folder` gets its checkpoint."""
    make(folder)
    return Checker(str(folder), DEMO_TOKENS, DEMO_EOS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schemas")
    parser.add_argument("--count", type=int, default=2000, help="random schemas")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--every", type=int, default=1, help="one of so many files of installed packages")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checker = demo_checker(Path(scratch) / "demo")
        drawn, files = Found(), Found()
        for seed in range(given.seed, given.seed + given.count):
            rng = Random(seed)
            checker.check(f"seed {seed}", random_schema(rng), rng, drawn)
        for name, schema in shipped(given.every):
            checker.check(name, schema, Random(name), files, answers=1, documents=1)
    print(table(drawn, files))
    wrong = [*drawn.wrong, *files.wrong, *drawn.masked, *files.masked]
    print("\n".join(wrong[:50]))
    return 1 if wrong else 0


def table(drawn: Found, files: Found) -> str:
    """In Markdown."""
    rows = ["| | random | shipped by installed packages |", "|---|---|---|"]
    for label, counts in (
        ("schemas that differ", [found.schemas for found in (drawn, files)]),
        ("refused by a keyword's name", [sum(found.refused.values()) for found in (drawn, files)]),
        ("answers", [found.answers for found in (drawn, files)]),
        ("cut at 1,500 tokens", [found.cut for found in (drawn, files)]),
        ("ended by a limit of llguidance", [sum(found.broken.values()) for found in (drawn, files)]),
        ("whole, and not what the schema says", [len(found.wrong) for found in (drawn, files)]),
        ("valid documents", [found.documents for found in (drawn, files)]),
        ("with a token that was masked", [len(found.masked) for found in (drawn, files)]),
        ("longest compile, ms", [round(found.slowest_s * 1000) for found in (drawn, files)]),
    ):
        rows.append(f"| {label} | {counts[0]:,} | {counts[1]:,} |")
    rows += ["", "| Refused for | random | shipped |", "|---|---|---|"]
    for named, _ in (drawn.refused + files.refused).most_common():
        rows.append(f"| {named} | {drawn.refused[named]:,} | {files.refused[named]:,} |")
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
