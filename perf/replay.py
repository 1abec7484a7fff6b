"""A gRPC server that answers every streamed request with the same tokens at once, as fast as gRPC sends.

    python -m perf.replay PORT TOKENS

It stands where an engine would, so that what is in front of it (the shim) is the only thing that costs. For
`perf.shim --replay`, never for tests of behaviour.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.serving import protocol

MODEL = "demo"


def response(token: int, last: bool) -> Any:
    """One streamed response as the LLM model sends it."""
    message = service_pb2.ModelStreamInferResponse()
    inner = message.infer_response
    inner.model_name = MODEL
    outputs = {
        protocol.TEXT_OUTPUT: string(b" token"),
        protocol.TOKEN_IDS: struct.pack("<i", token),
        protocol.FINISH_REASON: string(b"length" if last else protocol.NOT_FINISHED.encode()),
        protocol.NUM_INPUT_TOKENS: struct.pack("<I", 5),
        protocol.NUM_CACHED_TOKENS: struct.pack("<I", 0),
    }
    types = {tensor.name: "BYTES" if tensor.dtype == "STRING" else tensor.dtype for tensor in protocol.LLM_OUTPUTS}
    for name, raw in outputs.items():
        inner.outputs.add(name=name, datatype=types[name], shape=[1])
        inner.raw_output_contents.append(raw)
    return message


def string(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


class Replay(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Ready, with one LLM model."""

    def __init__(self, tokens: int) -> None:
        self._responses = [response(n, n == tokens - 1) for n in range(tokens)]

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        next(iter(requests))
        yield from self._responses

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=MODEL, state="READY")
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelConfigResponse()
        answer.config.name = MODEL
        for tensor in protocol.LLM_INPUTS:
            answer.config.input.add().name = tensor.name
        return answer


def main() -> None:
    port, tokens = int(sys.argv[1]), int(sys.argv[2])
    server = grpc.server(ThreadPoolExecutor(256))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Replay(tokens), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
