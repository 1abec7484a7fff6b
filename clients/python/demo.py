"""What `make demo` shows: a real server, the same completion over gRPC, over HTTP and through the ensemble.

python -m clients.python.demo
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult

from clients.python.generate_stream import generate_stream
from clients.python.local_server import LocalServer, ServerFailed
from clients.python.sync import Client
from clients.python.timing import Timing
from clients.python.wire import ServerError
from engine.terminal import Console
from engine.types import SamplingParams

PROMPT = "The queue module implements"
PARAMS = SamplingParams(max_tokens=64, temperature=0.0)


def over_grpc(server: LocalServer) -> Iterator[str]:
    """The LLM model `demo` with vllm_backend's tensors."""
    with Client(server.grpc, model="demo") as client:
        for chunk in client.stream(PROMPT, PARAMS):
            yield chunk.text


def over_http(server: LocalServer) -> Iterator[str]:
    """The same model over HTTP: server-sent events of generate_stream."""
    parameters = msgspec.json.encode(PARAMS).decode()
    request = {"text_input": PROMPT, "stream": True, "sampling_parameters": parameters}
    for event in generate_stream(server.http, "demo", request):
        yield event["text_output"]


def over_ensemble(server: LocalServer) -> Iterator[str]:
    """Tokenizer and LLM as one ensemble, with TensorRT-LLM's tensors."""
    values = {
        "text_input": np.array([[PROMPT.encode()]], dtype=np.object_),
        "stream": np.array([[True]]),
        "max_tokens": np.array([[PARAMS.max_tokens]], dtype=np.int32),
        "temperature": np.array([[PARAMS.temperature]], dtype=np.float32),
    }
    kinds = {"text_input": "BYTES", "stream": "BOOL", "temperature": "FP32"}
    inputs = []
    for name, value in values.items():
        inputs.append(InferInput(name, list(value.shape), kinds.get(name, "INT32")))
        inputs[-1].set_data_from_numpy(value)
    arrived: queue.Queue[tuple[InferResult | None, Exception | None]] = queue.Queue()
    with InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=60)
            if error is not None or result is None:
                raise ServerError(str(error), "UNKNOWN")
            text = result.as_numpy("text_output")
            if text is not None:
                yield b"".join(text.reshape(-1)).decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()


WAYS = {
    "gRPC, model demo": over_grpc,
    "HTTP generate_stream, model demo": over_http,
    "gRPC, ensemble (tokenizer, then demo)": over_ensemble,
}


def main() -> int:
    console = Console(highlight=False)
    console.print("Starting tritonserver on model_repository ...")
    began = time.monotonic()
    try:
        with LocalServer() as server:
            console.print(f"Ready after {time.monotonic() - began:.1f} s.\n")
            texts = [_show(console, name, way(server)) for name, way in WAYS.items()]
    except (ServerFailed, ServerError) as error:
        console.print(f"[red]error:[/] {error}", markup=True)
        return 1
    console.print("Stopped the server.")
    if len(set(texts)) != 1:
        console.print(f"error: the three ways must give the same text, but gave {json.dumps(texts)}")
        return 1
    console.print("All three ways gave the same text.")
    return 0


def _show(console: Console, name: str, texts: Iterator[str]) -> str:
    console.print(f"[bold]{name}[/]\n  {PROMPT}", end="")
    timing = Timing()
    shown = ""
    for text in texts:
        timing.token()
        shown += text
        console.print(text, end="", markup=False)
    console.print(f"\n  [green]{timing}[/]\n")
    return shown


if __name__ == "__main__":
    sys.exit(main())
