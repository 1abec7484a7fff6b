"""A real tritonserver for tests, and a gRPC streaming client small enough to see through."""

from __future__ import annotations

import queue
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

from engine import env
from engine.serving.launch import launcher, serve_loop
from engine.serving.link import protocol
from engine.serving.link.process_watch import start_time

_NUMPY = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "STRING": np.object_}
_DTYPES = {t.name: t.dtype for t in (*protocol.LLM_INPUTS, *protocol.TOKENIZER_INPUTS, *protocol.ENSEMBLE_INPUTS)}
WAIT_S = 60.0


class Server:
    """A tritonserver over `repository`, in a process of its own. models: what it loads at start."""

    def __init__(self, repository: Path, log: Path, models: tuple[str, ...] = (), exit_timeout_s: int = 30) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.log = log
        options = launcher.Options(
            repository=repository,
            models=models,
            http_port=self.http_port,
            grpc_port=self.grpc_port,
            metrics_port=self.metrics_port,
            host="127.0.0.1",
            exit_timeout_s=exit_timeout_s,
        )
        with log.open("w") as file:
            self.process = launcher.start(options, stdout=file, stderr=subprocess.STDOUT)
        self._started = start_time(self.process.pid)

    def wait_ready(self, timeout_s: float = WAIT_S) -> Server:
        deadline = time.monotonic() + timeout_s
        while not (serve_loop.is_ready(self.http_port) and listens(self.metrics_port)):  # which is opened last
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)
        return self

    def stop(self) -> int:
        """SIGTERM, as an orchestrator sends it; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()  # nothing of a test outlives it, whatever went wrong

    def post(self, path: str, body: bytes = b"{}") -> tuple[int, bytes]:
        """(status, body) of an HTTP POST."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", body, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def load(self, model: str) -> str | None:
        """Load a model; the error's text when it does not."""
        status, body = self.post(f"/v2/repository/models/{model}/load")
        return None if status == 200 else body.decode()

    def unload(self, model: str) -> None:
        status, body = self.post(f"/v2/repository/models/{model}/unload")
        assert status == 200, body
        wait_until(lambda: not self.has(model), f"{model} is unloaded")

    def has(self, model: str) -> bool:
        with InferenceServerClient(self.grpc) as client:
            return bool(client.is_model_ready(model))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        text = self.metrics_page()
        total = 0.0
        for match in re.finditer(rf"^{re.escape(name)}{{(.*)}} (\S+)$", text, re.MULTILINE):
            if all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
                total += float(match[2])
        return total

    def metrics_page(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    def engine_pids(self, model: str) -> list[int]:
        """Engine processes of this server that are alive and serve `model`."""
        return [pid for pid, words in self._children() if "engine.serving.host" in words and words[-1] == model]

    def stub_pids(self, model: str) -> list[int]:
        """Python-backend stubs of this server that are alive and run `model`: its frontends."""
        return [
            pid
            for pid, words in self._children()
            if words[0].endswith("triton_python_backend_stub") and f"/{model}/1/" in words[1]
        ]

    def _children(self) -> Iterator[tuple[int, list[str]]]:
        """(pid, command line) of the processes that were told this server's pid."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
            except OSError:
                continue
            if str(self.process.pid) in words and start_time(int(folder.name)):
                yield int(folder.name), words

    def run_folder(self) -> Path:
        """The folder with one folder for each model of this server."""
        return env.read().run_dir / f"{self.process.pid}-{self._started}"


class Call:
    """One request on a gRPC stream of its own; iterate over the responses as dicts of plain values."""

    def __init__(
        self,
        server: Server,
        model: str = "demo",
        parameters: dict[str, Any] | None = None,
        outputs: list[str] | None = None,
        inputs: list[InferInput] | None = None,
        **tensors: Any,
    ) -> None:
        self._client = InferenceServerClient(server.grpc)
        self._queue: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: self._queue.put((result, error)))
        self.final = False
        made = [infer_input(name, value, batched=model.endswith("ensemble")) for name, value in tensors.items()]
        self._client.async_stream_infer(
            model,
            [*made, *(inputs or ())],
            parameters=parameters,
            outputs=None if outputs is None else [InferRequestedOutput(name) for name in outputs],
            enable_empty_final_response=True,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while not self.final:
            yield self.next()

    def next(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next response. Raises the stream's InferenceServerException when the request failed."""
        result, error = self._queue.get(timeout=timeout_s)
        if error is not None:
            self.close()
            raise error
        response = result.get_response()
        self.final = response.parameters["triton_final_response"].bool_param
        if self.final:
            self.close()
        return {output.name: plain(result.as_numpy(output.name)) for output in response.outputs}

    def all(self) -> list[dict[str, Any]]:
        return list(self)

    @property
    def arrived(self) -> int:
        """Responses that nobody has asked for yet."""
        return self._queue.qsize()

    def cancel(self) -> None:
        """Leave, as a client does whose user has gone."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def close(self) -> None:
        """After the last response. Without a cancellation: 2.51 can crash on one that meets a request's end (#8034)."""
        self._client.stop_stream()
        self._client.close()


def infer_input(name: str, value: Any, batched: bool = False, dtype: str | None = None) -> InferInput:
    """An input tensor; scalars and lists become one dimension, with one more around it for the ensemble."""
    dtype = dtype or _DTYPES[name]
    items = value if isinstance(value, list) else [value]
    if dtype == "STRING":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    array = np.array([items] if batched else items, dtype=_NUMPY[dtype])
    tensor = InferInput(name, list(array.shape), "BYTES" if dtype == "STRING" else dtype)
    tensor.set_data_from_numpy(array)
    return tensor


def plain(array: Any) -> list[Any]:
    """Values without shape, bytes as text."""
    return [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]


def text_of(responses: list[dict[str, Any]]) -> str:
    return "".join(response["text_output"][0] for response in responses)


def tokens_of(responses: list[dict[str, Any]]) -> list[int]:
    return [token for response in responses for token in response["token_ids"]]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Any, what: str, timeout_s: float = WAIT_S) -> float:
    """Wait for `condition()`; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.01)
    return time.monotonic() - began
