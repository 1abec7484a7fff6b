"""Options, and a server, that several folders of tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from clients.python.local_server import LocalServer

# How long an example takes says nothing on a machine that others use.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Of `make test`; `make test-slow` takes as many as hypothesis does by itself.
hypothesis.settings.register_profile("few", deadline=None, max_examples=25)

# Triton's own functions are bound to its interpreter when triton is first imported, whoever does that.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Imports and items make millions of objects that stay: the collector would walk them again and again.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()
    gc.freeze()


# First, so that no hook counts what this machine cannot run.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs several GPUs is for machines that have them."""
    enough = config.getoption("--device") == "cuda" and torch.cuda.device_count() > 1
    without = [] if enough else [item for item in items if item.get_closest_marker("gpus")]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the correctness gate runs")
    parser.addoption("--figures", type=Path, help="write the correctness gate's figures to this file, as a table")
    parser.addoption("--complete", action="store_true", help="all of the correctness gate for every family")


@pytest.fixture(scope="session")
def demo_server() -> Iterator[LocalServer]:
    """Of model_repository, which holds the demo model; tests that share it are of the group "server"."""
    with LocalServer(Path(__file__).parents[1] / "model_repository") as running:
        yield running
