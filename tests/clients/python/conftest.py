"""A real server on the demo checkpoint, one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.python import Client
from clients.python.local_server import LocalServer


@pytest.fixture(scope="session")
def server(demo_server: LocalServer) -> LocalServer:
    return demo_server


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.grpc) as connected:
        yield connected
