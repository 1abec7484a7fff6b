"""Which file of tuned numbers a GPU has, and what stands in it. Needs no torch.

A file names its GPUs as the driver does (`gpus`), and the file whose numbers it takes where it has none of its own
(`inherits`, one step). `numbers`: by op, thresholds and tiles, which are the business of `kernels/<op>/dispatch.py`.
`algorithms`: by version of cublasLt, those of products that were measured to be fastest; they are never inherited. A
GPU that no file names has `default`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FOLDER = Path(__file__).parent
DEFAULT = "default"

# (outputs, inputs) → rows → an algorithm in the library's own numbers, or None where torch's is as fast.
Algorithms = dict[tuple[int, int], dict[int, tuple[int, ...] | None]]


@dataclass(frozen=True, slots=True)
class Table:
    """One file. numbers: what it has itself, by op."""

    name: str
    gpus: tuple[str, ...]
    inherits: str | None
    note: str
    numbers: dict[str, dict[str, Any]]
    algorithms: dict[int, Algorithms]


def read(path: Path) -> Table:
    """Raises ValueError, with the file's name, when it is no such table."""
    try:
        held = json.loads(path.read_text())
        algorithms = {int(version): _algorithms(products) for version, products in held.pop("algorithms", {}).items()}
        numbers = held.pop("numbers", {})
        table = Table(
            path.stem, tuple(held.pop("gpus")), held.pop("inherits", None), held.pop("note"), numbers, algorithms
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(f"{path} is no table of tuned numbers: {problem!r}") from None
    if held:
        raise ValueError(f"{path} has {', '.join(held)}, which nobody reads")
    return table


@lru_cache(maxsize=1)
def tables() -> dict[str, Table]:
    """All there are, by name."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.json"))}


@lru_cache(maxsize=64)
def name_of(gpu: str) -> str:
    """The table of a GPU, by the name that the driver gives it."""
    return next((table.name for table in tables().values() if gpu in table.gpus), DEFAULT)


@lru_cache(maxsize=256)
def numbers(table: str, op: str) -> dict[str, Any]:
    """What was tuned for an op: the table's own numbers, over those that it inherits."""
    own = tables()[table]
    above = tables()[own.inherits].numbers.get(op, {}) if own.inherits else {}
    return {**above, **own.numbers.get(op, {})}


@lru_cache(maxsize=256)
def tiles(table: str, op: str, key: str, kind: type[T]) -> dict[str, T]:
    """Of an op's numbers those under `key`: tiles by the names that its rules give them.

    Raises TypeError when one does not have the fields of `kind`.
    """
    return {name: kind(**fields) for name, fields in numbers(table, op)[key].items()}


def describe(gpu: str) -> str:
    """Which table a GPU has, in a sentence."""
    table = tables()[name_of(gpu)]
    return f"kernels/tuned/{table.name}.json: {table.note}"


def _algorithms(products: dict[str, dict[str, list[int] | None]]) -> Algorithms:
    made: Algorithms = {}
    for sizes, by_rows in products.items():
        outputs, inputs = map(int, sizes.split("x"))
        made[outputs, inputs] = {int(n): None if a is None else tuple(a) for n, a in by_rows.items()}
    return made
