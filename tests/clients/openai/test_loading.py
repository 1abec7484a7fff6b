"""Models come and go through the shim: /v1/models/{model}/load and /unload over a real server's repository."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from clients.python.local_server import LocalServer
from engine.demo import make as demo
from engine.serving.launch import repository
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai-loading")

GONE = "127.0.0.1:9"  # a replica that does not answer


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    """A server that has loaded its tokenizer alone, beside a replica that is away."""
    folder = tmp_path_factory.mktemp("loading")
    demo.make(folder / "demo")
    models = folder / "models"
    repository.add(folder / "demo", "demo", models, settings={}, tokenizer=True, ensemble=False, frontends=1)
    with LocalServer(models, flags=("--model", "demo_tokenizer")) as server:
        triton = f"{server.grpc}:{server.metrics.rsplit(':', 1)[1]}"
        running = Shim(folder, "--triton", triton, "--triton", GONE, "--admin-key", "boss", "--alias", "a/demo=demo")
        yield running
        running.stop()


def ask(shim: Shim, path: str) -> httpx.Response:
    return httpx.post(f"{shim.url}/v1/models/{path}", headers={"Authorization": "Bearer boss"}, timeout=120)


def names(shim: Shim) -> list[str]:
    return [card["id"] for card in httpx.get(f"{shim.url}/v1/models").json()["data"]]


def complete(shim: Shim) -> httpx.Response:
    body = {"model": "demo", "prompt": "The queue", "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{shim.url}/v1/completions", json=body, timeout=60)


def test_a_model_is_loaded_serves_is_unloaded_and_loaded_again(shim: Shim) -> None:
    assert names(shim) == []
    assert [httpx.get(f"{shim.url}/health{path}").status_code for path in ("", "/ready")] == [503, 200]
    assert complete(shim).json()["error"]["code"] == "model_not_found"  # a server answers: there is nothing to wait for
    loaded = ask(shim, "demo/load")
    assert (loaded.status_code, loaded.json()["id"]) == (200, "demo")
    assert len(loaded.json()["replicas"]) == 1
    assert names(shim) == ["a/demo", "demo"]  # at once: no health check later
    assert httpx.get(f"{shim.url}/health").status_code == 200
    assert complete(shim).json()["usage"]["completion_tokens"] == 4
    again = ask(shim, "a/demo/load")  # by its alias
    assert (again.status_code, again.json()["error"]["code"]) == (400, "already_loaded")
    with ThreadPoolExecutor(3) as pool:
        statuses = sorted(answer.status_code for answer in pool.map(lambda _: ask(shim, "demo/unload"), range(3)))
    assert statuses == [200, 400, 400]
    assert names(shim) == []
    assert ask(shim, "demo/unload").json()["error"]["code"] == "not_loaded"
    assert complete(shim).status_code == httpx.get(f"{shim.url}/v1/models/demo").status_code == 404
    assert ask(shim, "demo/load").status_code == 200
    assert complete(shim).status_code == 200


@pytest.mark.parametrize("name", ["none", "", "demo/%2e%2e", "%2e%2e%2fetc", "/etc/passwd", "demo%00"])
def test_a_name_that_no_repository_has_is_404(shim: Shim, name: str) -> None:
    for verb in ("load", "unload"):
        assert ask(shim, f"{name}/{verb}").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["%2e%2e", "%2e", "%0A%09", "%20"])
def test_what_is_no_name_is_400(shim: Shim, name: str) -> None:
    for verb in ("load", "unload"):
        assert ask(shim, f"{name}/{verb}").json()["error"]["param"] == "model"


def test_nobody_loads_without_the_admin_key(shim: Shim) -> None:
    for path in ("demo/load", "demo/unload", "a%0Ab/load"):
        assert httpx.post(f"{shim.url}/v1/models/{path}").status_code == 401
    assert httpx.post(f"{shim.url}/v1/models/demo/load", headers={"Authorization": "Bearer x"}).status_code == 401


def test_without_a_server_the_answer_is_503(tmp_path: Path) -> None:
    alone = Shim(tmp_path, "--triton", GONE, "--admin-key", "boss")
    try:
        answer = ask(alone, "demo/load")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "backend_unavailable")
        assert httpx.get(f"{alone.url}/health/ready").status_code == 503
    finally:
        alone.stop()
