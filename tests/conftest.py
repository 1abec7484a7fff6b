"""Options that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the correctness gate runs")
    parser.addoption("--figures", type=Path, help="write the correctness gate's figures to this file, as a table")
    parser.addoption("--complete", action="store_true", help="all of the correctness gate for every family")
