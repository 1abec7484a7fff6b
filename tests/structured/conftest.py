"""The demo checkpoint: a tokenizer of 640 tokens, and a small model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.demo.make import make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured") / "demo"
    make(folder)
    return folder
