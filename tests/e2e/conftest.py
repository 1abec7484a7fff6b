"""One server for the whole session: the demo checkpoint in a small pool, so that pool and queue can be filled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.demo.make import make
from engine.serving.launch import repository
from tests.e2e.harness import Server

# 96 blocks of 16 hold 1,536 tokens, less than the context of 8,192: a prompt can be too long for either.
SETTINGS = {
    "cache.num_blocks": "96",
    "scheduler.max_rows": "16",
    "scheduler.max_waiting": "24",
    "scheduler.token_budget": "256",
    "restart_limit": "100",  # one server has the engines of many tests killed within a minute
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests share a server, so they share a worker. Those of recovery, which mostly wait, take a third of the
    time: they have another."""
    for item in items:
        if "tests/e2e/" in str(item.path):
            group = "recovery" if item.path.stem == "test_recovery" else "server"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "demo"
    make(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A model repository with `demo`, `tokenizer` and `ensemble`; tests add broken ones beside them."""
    root = tmp_path_factory.mktemp("models")
    parameters = {"model": str(checkpoint)}
    repository.write_llm(root, "demo", {**parameters, **SETTINGS})
    repository.write_tokenizer(root, "tokenizer", parameters)
    repository.write_ensemble(root, "ensemble", "tokenizer", "demo")
    return root


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    # tritonserver 2.51 leaks the reference of a gRPC request with a wrong dtype, so after that test its models never
    # unload and it always waits for the whole of its exit timeout.
    running = Server(models, log, models=("demo", "tokenizer", "ensemble"), exit_timeout_s=3)
    try:
        yield running.wait_ready()
    finally:
        running.stop()
