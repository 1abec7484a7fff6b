"""A file that grows past 500 lines does more than one thing."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 500
FILES = sorted(
    file for folder in ("engine", "kernels", "clients", "perf", "tests") for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES


def test_every_package_is_one() -> None:
    """A folder with modules has an __init__.py, else it would be left out of an installation."""
    folders = {file.parent for file in FILES}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
