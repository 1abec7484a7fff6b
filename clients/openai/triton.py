"""One tritonserver as the shim sees it. Every Triton call and every tensor name of this package stands here."""

from __future__ import annotations

import itertools
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import msgspec
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from clients.openai.config import Replica
from clients.openai.errors import BackendError

_LLM_INPUTS = {"text_input", "input_ids", "sampling_parameters", "stream"}
_TOKENIZER_INPUTS = {"text_input", "messages", "template_parameters", "token_ids"}
_UNREACHABLE = "The model's server cannot be reached or is going away; try again in a moment."
_LATE_S = 15.0  # after the engine's own deadline, a server that still says nothing is given up
_NOT_FINISHED = "None"
_TIMED_OUT = "ran past its timeout"  # Triton has no code for it; another replica must not be asked


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue: text that the model tokenizes, or ids. `key` is what prefix affinity compares."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    affinity: str | None = None

    @property
    def key(self) -> bytes:
        if self.affinity is not None:
            return b"\0" + self.affinity.encode()
        return np.asarray(self.ids, np.int32).tobytes() if self.ids is not None else (self.text or "").encode()


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to an LLM model. `sampling` is sent as the JSON tensor sampling_parameters."""

    model: str
    request_id: str
    prompt: Prompt
    sampling: dict[str, Any]
    stream: bool
    logprobs: bool = False
    cumulative: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One response of an LLM model: the text and tokens since the one before.

    logprobs: one {token id: {logprob, rank, decoded_token}} a token, the chosen token first.
    finish_reason is set on the last piece.
    """

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    cumulative_logprob: float = 0.0
    num_input: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An LLM model of a repository and the model that tokenizes for it (None: text cannot be templated)."""

    name: str
    tokenizer: str | None = None
    max_model_len: int | None = None
    owner: str = field(default="nereid")


class TritonReplica:
    """A connection to one tritonserver. Create it inside the event loop that uses it."""

    def __init__(self, address: Replica) -> None:
        self.address = address
        self._client = triton.InferenceServerClient(
            address.grpc,
            keepalive_options=triton.KeepAliveOptions(keepalive_time_ms=30_000, keepalive_timeout_ms=10_000),
        )

    async def close(self) -> None:
        await self._client.close()

    async def ready(self, timeout_s: float = 2.0) -> bool:
        try:
            return bool(await self._client.is_server_ready(client_timeout=timeout_s))
        except (InferenceServerException, grpc.RpcError):
            return False

    async def version(self) -> str:
        metadata = await self._client.get_server_metadata(client_timeout=2.0)
        return str(metadata.version)

    async def models(self) -> dict[str, ModelInfo]:
        """The LLM models that are ready, by name. Raises BackendError when the server does not answer."""
        try:
            index = await self._client.get_model_repository_index(client_timeout=5.0)
            names = [entry.name for entry in index.models if entry.state == "READY"]
            configs = [(await self._client.get_model_config(name, client_timeout=5.0)).config for name in names]
        except (InferenceServerException, grpc.RpcError) as error:
            _raise(error)
        return discover(configs)

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Pieces as they come. Leaving the iteration cancels the request in the engine. Raises BackendError."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield _llm_request(generation)

        deadline = generation.sampling["timeout_s"] + _LATE_S
        call = self._client.stream_infer(requests(), stream_timeout=deadline)
        finished, failure = False, None
        try:
            async for result, error in call:
                if error is not None:
                    _raise(error)
                tensors = _tensors(result.get_response())
                if "error" in tensors:
                    failure = read_failure(tensors["error"])
                else:
                    piece = read_piece(tensors)
                    finished = finished or piece.finish_reason is not None
                    yield piece
            # Only now: a call that is left before its end is cancelled, and 2.51 can crash on a cancellation that
            # meets the end of its request (server issue 8034).
            if failure is not None:
                raise failure
            if not finished:
                raise BackendError("INTERNAL", "the server ended the stream before the request was finished")
        except (InferenceServerException, grpc.RpcError) as error:
            _raise(error)
        finally:
            call.cancel()

    async def encode(self, tokenizer: str, text: str, add_special_tokens: bool) -> list[int]:
        inputs = [_strings("text_input", text), _flag("add_special_tokens", add_special_tokens)]
        return await self._ids(tokenizer, inputs)

    async def encode_chat(
        self, tokenizer: str, messages: Sequence[dict[str, Any]], parameters: dict[str, Any]
    ) -> list[int]:
        """Ids of a conversation through the chat template. `parameters`: tools, add_generation_prompt, variables."""
        inputs = [
            _strings("messages", msgspec.json.encode(messages).decode()),
            _strings("template_parameters", msgspec.json.encode(parameters).decode()),
        ]
        return await self._ids(tokenizer, inputs)

    async def decode(self, tokenizer: str, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tensor = triton.InferInput("token_ids", [len(ids)], "INT32")
        tensor.set_data_from_numpy(np.asarray(ids, np.int32))
        response = await self._infer(tokenizer, [tensor, _flag("skip_special_tokens", skip_special_tokens)])
        return _first_string(response["text_output"])

    async def _ids(self, tokenizer: str, inputs: list[triton.InferInput]) -> list[int]:
        raw = (await self._infer(tokenizer, inputs))["input_ids"]
        return [int(i) for i in np.frombuffer(raw, np.int32)]

    async def _infer(self, model: str, inputs: list[triton.InferInput]) -> dict[str, bytes]:
        try:
            result = await self._client.infer(model, inputs, client_timeout=60.0)
        except (InferenceServerException, grpc.RpcError) as error:
            _raise(error)
        return _tensors(result.get_response())


def discover(configs: Sequence[Any]) -> dict[str, ModelInfo]:
    """LLM models among model configurations, each with its tokenizer.

    A model is an LLM when it takes the LLM's tensors. Its tokenizer is what an ensemble puts before it, else
    `NAME_tokenizer`, else `tokenizer` when the repository holds one tokenizer only.
    """
    inputs = {config.name: {tensor.name for tensor in config.input} for config in configs}
    llms = [config for config in configs if inputs[config.name] >= _LLM_INPUTS]
    tokenizers = [name for name, names in inputs.items() if names >= _TOKENIZER_INPUTS]
    before: dict[str, str] = {}
    for config in configs:
        steps = [step.model_name for step in config.ensemble_scheduling.step]
        for first, second in itertools.pairwise(steps):
            if first in tokenizers:
                before[second] = first
    found = {}
    for config in llms:
        named = f"{config.name}_tokenizer"
        only = tokenizers[0] if len(tokenizers) == 1 else None
        tokenizer = before.get(config.name, named if named in tokenizers else only)
        length = config.parameters["max_model_len"].string_value if "max_model_len" in config.parameters else ""
        found[config.name] = ModelInfo(config.name, tokenizer, int(length) if length.isdigit() else None)
    return found


def read_failure(raw: bytes) -> BackendError:
    """Why a request failed, out of the tensor `error`."""
    told = _json(raw)
    code = "DEADLINE_EXCEEDED" if _TIMED_OUT in told["message"] else told["code"]
    return BackendError(code, told["message"], refused=True)


def read_piece(tensors: Mapping[str, bytes]) -> Piece:
    """The serialized outputs of one response as a Piece. It runs once a token: no numpy, no second pass."""
    finish = _first_string(tensors.get("finish_reason", b""))
    ids = tensors.get("token_ids", b"")
    return Piece(
        text=_first_string(tensors.get("text_output", b"")),
        token_ids=struct.unpack(f"<{len(ids) // 4}i", ids),
        finish_reason=None if finish in ("", _NOT_FINISHED) else finish,
        logprobs=_json(tensors.get("logprobs")),
        prompt_logprobs=_json(tensors.get("prompt_logprobs")),
        cumulative_logprob=_number("<f", tensors.get("cumulative_logprob")),
        num_input=int(_number("<I", tensors.get("num_input_tokens"))),
        num_cached=int(_number("<I", tensors.get("num_cached_tokens"))),
    )


def _llm_request(generation: Generation) -> dict[str, Any]:
    prompt = generation.prompt
    inputs = [
        _flag("stream", generation.stream),
        _flag("exclude_input_in_output", True),
        _strings("sampling_parameters", msgspec.json.encode(generation.sampling).decode()),
        _flag("return_finish_reason", True),
        _flag("return_num_input_tokens", True),
        _flag("return_num_cached_tokens", True),
        # Not Triton's triton_grpc_error header, the other way to have codes: 2.51 crashes under it (docs/openai.md).
        _flag("return_error", True),
    ]
    outputs = ["text_output", "finish_reason", "token_ids", "num_input_tokens", "num_cached_tokens", "error"]
    if prompt.ids is not None:
        tensor = triton.InferInput("input_ids", [len(prompt.ids)], "INT32")
        tensor.set_data_from_numpy(np.asarray(prompt.ids, np.int32))
        inputs.append(tensor)
    else:
        inputs.append(_strings("text_input", prompt.text or ""))
    for wanted, name in (
        (generation.logprobs, "logprobs"),
        (generation.cumulative, "cumulative_logprob"),
        (generation.prompt_logprobs, "prompt_logprobs"),
    ):
        if wanted:
            inputs.append(_flag(f"return_{name}", True))
            outputs.append(name)
    return {
        "model_name": generation.model,
        "inputs": inputs,
        "outputs": [triton.InferRequestedOutput(name) for name in outputs],
        "request_id": generation.request_id,
    }


def _strings(name: str, text: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def _flag(name: str, value: bool) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def _tensors(response: Any) -> dict[str, bytes]:
    return dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=False))


def _first_string(raw: bytes) -> str:
    """The first element of a serialized BYTES tensor (a 4-byte little-endian length before each element)."""
    if len(raw) < 4:
        return ""
    (length,) = struct.unpack_from("<I", raw)
    return raw[4 : 4 + length].decode("utf-8", "replace")


def _json(raw: bytes | None) -> Any:
    text = _first_string(raw) if raw else ""
    return msgspec.json.decode(text) if text else None


def _number(layout: str, raw: bytes | None) -> float:
    return float(struct.unpack_from(layout, raw)[0]) if raw else 0.0


def _raise(error: Exception) -> NoReturn:
    """Triton's and gRPC's errors as BackendError. Cancellation by the caller passes through as it is."""
    if isinstance(error, grpc.RpcError):
        code, message = error.code().name, error.details() or ""
    elif isinstance(error, InferenceServerException):
        status = error.status() or ""
        code, message = status.rsplit(".", 1)[-1] or "INTERNAL", error.message() or str(error)
    else:
        raise error
    if code in ("OK", "UNKNOWN"):
        code = "INTERNAL"
    if code == "INTERNAL" and "unknown model" in message.lower():
        code = "UNAVAILABLE"  # it was there at the last look: it is being unloaded or has just failed
    if code == "UNAVAILABLE":
        raise BackendError(code, _UNREACHABLE, detail=message) from error
    raise BackendError(code, message) from error
