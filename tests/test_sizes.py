"""A file that grows past 500 lines does more than one thing, and so does a function that grows past 60."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES, MAX_FUNCTION_LINES = 500, 60
FILES = sorted(
    file for folder in ("engine", "kernels", "clients", "perf", "tests") for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("folder", ["engine", "clients"])
def test_functions_are_short(folder: str) -> None:
    """Not those of kernels, whose arguments alone take lines."""
    long = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES  # type: ignore[operator]
    ]
    assert not long


def test_every_package_is_one() -> None:
    """A folder with modules has an __init__.py, else it would be left out of an installation."""
    folders = {file.parent for file in FILES}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
