"""A gRPC server that answers every streamed request with the same tokens at once, as fast as gRPC sends.

    python -m perf.bench.replay PORT TOKENS

TOKENS is the most of one answer; a request that names fewer in `max_tokens` gets as many. It stands where an engine
would, so that what is in front of it (the shim) is the only thing that costs. For `perf.bench.shim --replay`, never for
tests of behaviour.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from engine.serving.link import protocol

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


def serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def max_tokens(request: Any) -> int:
    """What the request's sampling parameters ask for."""
    place = [tensor.name for tensor in request.inputs].index(protocol.SAMPLING_PARAMETERS)
    return int(json.loads(request.raw_input_contents[place][4:])["max_tokens"])


class Replay:
    """Ready, with one LLM model. The methods that a client of one model needs."""

    def __init__(self, tokens: int) -> None:
        self._responses = [response(n, False).SerializeToString() for n in range(tokens)]

    def methods(self) -> dict[str, Any]:
        """Name -> handler."""
        unary = {
            "ServerReady": (self.server_ready, service_pb2.ServerReadyRequest),
            "RepositoryIndex": (self.repository_index, service_pb2.RepositoryIndexRequest),
            "ModelConfig": (self.model_config, service_pb2.ModelConfigRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, request.FromString, serialize)
            for name, (method, request) in unary.items()
        }
        # a stream's messages are serialized already
        stream = grpc.stream_stream_rpc_method_handler(self.stream, service_pb2.ModelInferRequest.FromString)
        return {**handlers, "ModelStreamInfer": stream}

    def stream(self, requests: Iterator[Any], context: Any) -> Iterator[bytes]:
        """ModelStreamInfer, from messages that were serialized once."""
        count = min(max_tokens(next(iter(requests))), len(self._responses))
        yield from self._responses[: count - 1]
        yield response(count - 1, True).SerializeToString()

    def server_ready(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def repository_index(self, request: Any, context: Any) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=MODEL, state="READY")
        return answer

    def model_config(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelConfigResponse()
        answer.config.name = MODEL
        for tensor in protocol.LLM_INPUTS:
            answer.config.input.add().name = tensor.name
        return answer


def main() -> None:
    port, tokens = int(sys.argv[1]), int(sys.argv[2])
    server = grpc.server(ThreadPoolExecutor(256))
    methods = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", Replay(tokens).methods())
    server.add_generic_rpc_handlers([methods])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
