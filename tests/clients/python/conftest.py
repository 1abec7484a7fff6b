"""A real server on the demo checkpoint, one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.python import Client
from clients.python.local_server import LocalServer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServer]:
    with LocalServer(ROOT / "model_repository") as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.grpc) as connected:
        yield connected
