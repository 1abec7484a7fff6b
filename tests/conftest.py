"""Options that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# How long an example takes says nothing on a machine that others use.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Triton's own functions are bound to its interpreter when triton is first imported, whoever does that.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the correctness gate runs")
    parser.addoption("--figures", type=Path, help="write the correctness gate's figures to this file, as a table")
    parser.addoption("--complete", action="store_true", help="all of the correctness gate for every family")
