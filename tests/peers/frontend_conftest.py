"""Laid over NVIDIA's tests of its OpenAI frontend, which start tritonserver in their process: this server for it.

`tests.peers.frontend` puts it beside their `tests` folder. Their files stay as they are; what they import to start a
server is this module's: a real tritonserver with this repository's models, and `nereid openai` in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import http.client
import inspect
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastapi.testclient
import httpx
import openai
import pytest
import requests

from clients.python.local_server import LocalServer, free_ports
from engine.serving.launch import repository

KEY = "peers"
MAX_BODY = 64 << 20  # their limit
START_S = 300.0
CHECKPOINT = Path(os.environ["NEREID_PEERS_CHECKPOINT"])
# folder of models of theirs -> the entries that stand for them
ENTRIES = {"test_models": ("mock_llm", "identity_py"), "tool_parser_models": ("tool_stream_py",)}
_admins: set[str] = set()  # shims that take load and unload from everyone who sends the key
_open = contextlib.ExitStack()
_shims: dict[tuple[str, ...], Shim] = {}


class ModelControlMode(enum.Enum):
    NONE = 1
    EXPLICIT = 3


class Shim:
    """`nereid openai` over a tritonserver."""

    def __init__(self, triton: LocalServer, flags: Sequence[str]) -> None:
        (port,) = free_ports(1)
        self.url = f"http://localhost:{port}"
        command = [sys.executable, "-m", "clients.openai", "--port", str(port), "--max-body-bytes", str(MAX_BODY)]
        command += ["--triton", f"{triton.grpc}:{triton.metrics.rpartition(':')[2]}", *flags]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, cwd=os.environ["NEREID_PEERS_CWD"]
        )
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                self._log.seek(0)
                raise RuntimeError(f"the shim did not start: {self._log.read().decode()}")
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.url}/version", timeout=5).status_code == 200
        except (requests.ConnectionError, requests.Timeout):  # it listens seconds before it answers
            return False


class Server:
    """What `setup_server` gives: the models to serve."""

    def __init__(self, folder: str, mode: ModelControlMode, load: Sequence[str]) -> None:
        names = ENTRIES.get(Path(folder).name, (os.environ["TEST_MODEL"],))
        self.every = names
        self.models = names if mode is ModelControlMode.NONE or "*" in load else tuple(load)

    def stop(self) -> None:
        """Nothing: a server is kept for the tests that ask for the same one."""


def setup_server(
    model_repository: str,
    model_control_mode: ModelControlMode = ModelControlMode.NONE,
    load_models: Sequence[str] | None = None,
) -> Server:
    return Server(model_repository, model_control_mode, load_models or ())


def setup_fastapi_app(tokenizer: str, server: Server, backend: str | None, **_: Any) -> Shim:
    """The shim over the server's models, kept for all tests; its entries have their tokenizer."""
    if server.models not in _shims:
        _shims[server.models] = _started(server, ("--admin-key", KEY), _open)
    return _shims[server.models]


def _started(server: Server, flags: Sequence[str], until: contextlib.ExitStack) -> Shim:
    folder = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="nereid-peers-")))
    settings = {"model": str(CHECKPOINT)}
    for name in server.every:
        repository.write_llm(folder, name, settings, 1)
    repository.write_tokenizer(folder, "tokenizer", settings)
    loaded = [word for name in (*server.models, "tokenizer") for word in ("--model", name)]
    server = until.enter_context(LocalServer(folder, ready_s=START_S, flags=loaded))
    shim = Shim(server, flags)
    until.callback(shim.stop)
    if KEY in flags:
        _admins.add(shim.url)
    return shim


class OpenAIServer:
    """Their command line, read as this server's."""

    def __init__(self, cli_args: Sequence[str], *, env_dict: dict[str, str] | None = None) -> None:
        given = _flags(cli_args)
        explicit = given.get("--model-control-mode") == [["explicit"]]
        load = [word for words in given.get("--load-model", []) for word in words]
        mode = ModelControlMode.EXPLICIT if explicit else ModelControlMode.NONE
        server = Server(given["--model-repository"][0][0], mode, load)
        flags = [] if given.get("--openai-restricted-api") else ["--admin-key", KEY]
        for groups, header, value in given.get("--openai-restricted-api", []):
            flags += ["--openai-restricted-api", f"{groups}:{header}={value}"]
        self._open = contextlib.ExitStack()
        managed = explicit or server.every in ENTRIES.values()  # its tests load and unload models
        try:
            shim = _started(server, flags, self._open) if managed else setup_fastapi_app("", server, None)
        except BaseException:
            self._open.close()
            raise
        self.url_root = shim.url

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="EMPTY", max_retries=0)

    def get_async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="EMPTY", max_retries=0)


def _flags(words: Sequence[str]) -> dict[str, list[list[str]]]:
    """--flag -> the values of each time it stands there."""
    found: dict[str, list[list[str]]] = {}
    for word in words:
        if word.startswith("--"):
            found.setdefault(word, []).append([])
            last = found[word][-1]
        else:
            last.append(word)
    return found


class TestClient(httpx.Client):
    """For FastAPI's, which calls an application in its own process: the shim over a socket."""

    __test__ = False

    def __init__(self, app: Shim) -> None:
        super().__init__(base_url=app.url, timeout=None, event_hooks={"request": [self._with_key]})

    @staticmethod
    def _with_key(request: httpx.Request) -> None:
        if request.url.path.endswith(("/load", "/unload")):
            request.headers["Authorization"] = f"Bearer {KEY}"


def _send_key(send: Any) -> Any:
    """requests' Session.request with the admin key for load and unload, which this server does for nobody without."""

    def request(self: requests.Session, method: str, url: str, **given: Any) -> requests.Response:
        if url.endswith(("/load", "/unload")) and any(url.startswith(f"{shim}/") for shim in _admins):
            given["headers"] = {**(given.get("headers") or {}), "Authorization": f"Bearer {KEY}"}
        answer: requests.Response = send(self, method, url, **given)
        return answer

    return request


def _send_key_too(send: Any) -> Any:
    """The same for HTTPConnection.request of the standard library."""

    def request(
        self: http.client.HTTPConnection,
        method: str,
        url: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        **given: Any,
    ) -> None:
        if url.endswith(("/load", "/unload")) and f"http://{self.host}:{self.port}" in _admins:
            headers = {**(headers or {}), "Authorization": f"Bearer {KEY}"}
        send(self, method, url, body, headers or {}, **given)

    return request


def _stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


_stand_in("tritonserver", Server=Server, ModelControlMode=ModelControlMode)
_stand_in("tests.utils", OpenAIServer=OpenAIServer, setup_server=setup_server, setup_fastapi_app=setup_fastapi_app)
sys.path.append(str(Path(__file__).parent / "openai_frontend"))  # their utils does it
fastapi.testclient.TestClient = TestClient  # type: ignore[misc,assignment]
requests.Session.request = _send_key(requests.Session.request)  # type: ignore[method-assign]
http.client.HTTPConnection.request = _send_key_too(http.client.HTTPConnection.request)  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """As pytest-asyncio runs them."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    loop = pyfuncitem._request.getfixturevalue("_loop")
    names = pyfuncitem._fixtureinfo.argnames
    loop.run_until_complete(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_unconfigure() -> None:
    _open.close()
