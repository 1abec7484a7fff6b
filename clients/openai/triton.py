"""One tritonserver as the shim sees it: tritonclient's gRPC stub on a channel of grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients.openai import wire
from clients.openai.config import Replica
from clients.openai.errors import BackendError
from clients.openai.wire import Generation, ModelInfo, Piece

_DESCRIBE_S = 2.0
_INDEX_S = 5.0
_RESET_S = 30.0  # it happens between two steps
_LATE_S = 0.6  # a frontend ends what is 0.3 s past its time; a server that still says nothing is given up
_MIN_S = 1e-3
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class TritonReplica:
    """A connection to one tritonserver. Create it inside the event loop that uses it."""

    def __init__(self, address: Replica) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address.grpc, options=_CHANNEL)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # A stream call that sends one request: the request and the end of sending then travel as one.
        self._generate = self._channel.unary_stream(
            _STREAM, request_serializer=service_pb2.ModelInferRequest.SerializeToString, response_deserializer=None
        )

    async def close(self) -> None:
        await self._channel.close()

    async def models(self) -> tuple[dict[str, ModelInfo], frozenset[str]]:
        """The LLM models that are ready, by name, and the names of models that are being loaded or could not be. Raises
        BackendError when the server does not answer.

        The server's own readiness is not asked for: it ends for all models when the load of any one fails.
        """
        try:
            index = await self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=2.0)
            names = [entry.name for entry in index.models if entry.state == "READY"]
            waited = frozenset(entry.name for entry in index.models if _is_waited_for(entry.state, entry.reason))
            configs = [await self._config(name) for name in names]
        except grpc.RpcError as error:
            raise _failure(error) from error
        infos = wire.discover(configs).values()
        return {info.name: info for info in await asyncio.gather(*map(self._described, infos))}, waited

    async def repository(self) -> dict[str, str]:
        """State of every model of the server's repository: READY, LOADING, UNLOADING, UNAVAILABLE, or "" for one that
        was never loaded. Raises BackendError."""
        try:
            index = await self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=_INDEX_S)
        except grpc.RpcError as error:
            raise _failure(error) from error
        return {entry.name: entry.state for entry in index.models}

    async def load(self, model: str, timeout_s: float) -> None:
        """Returns when the model is ready. Raises BackendError with the server's reason."""
        try:
            request = service_pb2.RepositoryModelLoadRequest(model_name=model)
            await self._stub.RepositoryModelLoad(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _failure(error) from error

    async def unload(self, model: str) -> None:
        """Returns before the model's requests have ended. Raises BackendError."""
        try:
            request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
            await self._stub.RepositoryModelUnload(request, timeout=_INDEX_S)
        except grpc.RpcError as error:
            raise _failure(error) from error

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Pieces as they come. Leaving the iteration cancels the request in the engine. Raises BackendError."""
        left = max(_MIN_S, generation.deadline - time.monotonic())
        # In tenths, so that requests of one kind have one text of fields, which frontends know from the one before.
        told = round(left, 1) if left > 2 else left
        metadata = tuple(generation.trace.items()) or None  # for the server's own spans
        call = self._generate(wire.llm_request(generation, told), timeout=left + _LATE_S, metadata=metadata)
        several = wire.AnswersReader(generation) if generation.answers > 1 else None
        reader = several or wire.PieceReader(generation.index)
        read, parse = call.read, reader.read
        try:
            while (message := await read()) is not grpc.aio.EOF:
                if several is not None:
                    for answer in several.read_all(message):
                        yield answer
                    continue
                piece = parse(message)
                if piece is not None:
                    yield piece
            # Only now: a call that is left before its end is cancelled, and 2.51 can crash on a cancellation that
            # meets the end of its request (server issue 8034).
            if reader.failure is not None:
                raise reader.failure
            if not reader.finished:
                raise BackendError("INTERNAL", "the server ended the stream before the request was finished")
        except grpc.RpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()  # changes nothing when the call is over

    async def encode(self, tokenizer: str, text: str, add_special_tokens: bool) -> list[int]:
        request = wire.unary_request(tokenizer)
        wire.add_text(request, "text_input", text.encode())
        wire.add_flag(request, "add_special_tokens", add_special_tokens)
        return _ids(await self._infer(request))

    async def encode_chat(
        self, tokenizer: str, messages: Sequence[dict[str, Any]], parameters: dict[str, Any], context: int | None = None
    ) -> tuple[list[int], str]:
        """Ids and text of a conversation through the chat template.

        parameters: tools, add_generation_prompt, variables. context: tokens that the model holds, where it is to answer
        the whole of it: what can only be longer is refused before it is tokenized.
        """
        request = wire.unary_request(tokenizer)
        wire.add_text(request, "messages", msgspec.json.encode(messages))
        wire.add_text(request, "template_parameters", msgspec.json.encode(parameters))
        if context is not None:
            request.parameters["max_model_len"].int64_param = context
        found = await self._infer(request)
        return _ids(found), wire.first_string(found["text_output"])

    async def decode(self, tokenizer: str, ids: Sequence[int], skip_special_tokens: bool) -> str:
        request = wire.unary_request(tokenizer)
        wire.add_ids(request, "token_ids", ids)
        wire.add_flag(request, "skip_special_tokens", skip_special_tokens)
        return wire.first_string((await self._infer(request))["text_output"])

    async def reset_prefix_cache(self, model: str) -> None:
        """Raises BackendError."""
        try:
            async for message in self._generate(wire.reset_request(model), timeout=_RESET_S):
                failure = wire.reset_failure(message)
                if failure is not None:
                    raise failure
        except grpc.RpcError as error:
            raise _failure(error) from error

    async def _described(self, info: ModelInfo) -> ModelInfo:
        """With nothing more for a model that was added before it could say, and a problem for one that does not answer
        now."""
        if not info.describes:
            return info
        found = None
        with contextlib.suppress(grpc.RpcError):
            async for message in self._generate(wire.describe_request(info.name), timeout=_DESCRIBE_S):
                found = wire.read_description(message) or found
        return replace(info, problem="it does not say how it is") if found is None else info.described(found)

    async def _config(self, name: str) -> Any:
        return (await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=name), timeout=5.0)).config

    async def _infer(self, request: Any) -> dict[str, bytes]:
        try:
            return wire.tensors(await self._stub.ModelInfer(request, timeout=60.0))
        except grpc.RpcError as error:
            raise _failure(error) from error


def _ids(found: dict[str, bytes]) -> list[int]:
    ids: list[int] = np.frombuffer(found["input_ids"], np.int32).tolist()
    return ids


def _is_waited_for(state: str, reason: str) -> bool:
    """Whether a model is being loaded, or could not be: one that was unloaded, or never asked for, is in no need."""
    return state == "LOADING" or (state == "UNAVAILABLE" and reason not in ("", "unloaded"))


def _failure(error: grpc.RpcError) -> BackendError:
    return wire.from_status(error.code().name, error.details() or "")
