"""The table of ops in README.md, from the registry: python -m kernels.table writes it."""

from __future__ import annotations

import importlib
from pathlib import Path

from kernels.registry import Op, registry

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- ops: python -m kernels.table -->", "<!-- end of ops -->"


def _table_row(op: Op) -> str:
    cases = op.cases()
    what = (importlib.import_module(f"kernels.{op.name}.reference").__doc__ or "").strip().splitlines()[0].rstrip(".:")
    dtypes = dict.fromkeys(str(case.dtype).removeprefix("torch.") for case in cases)
    writes = ", ".join(f"`{name}`" for name in cases[0].mutated) or ""
    small = sum(case.small for case in cases)
    return f"| `{op.name}` | {what} | {', '.join(dtypes)} | {writes} | {small} + {len(cases) - small} |"


def table() -> str:
    head = ["| op | what | types in its cases | writes into | cases: small + real shapes |", "|---|---|---|---|---|"]
    return "\n".join([BEGIN, *head, *map(_table_row, registry()), END])


def filled(text: str) -> str:
    """`text` with the table between its marks replaced by the registry's."""
    before, rest = text.split(BEGIN, 1)
    return before + table() + rest.split(END, 1)[1]


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
