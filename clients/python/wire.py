"""Requests to tensors and responses to values: the LLM model has vllm_backend's tensors, the tokenizer its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc import InferInput, InferResult
from tritonclient.utils import InferenceServerException

from engine.types import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_GRPC_NAMES = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}  # Triton's name: gRPC's
_NOT_FINISHED = "None"  # vllm_backend's finish_reason of a response that is not the last


class ServerError(Exception):
    """The server refused a request or lost it. code: gRPC's name of the status, e.g. INVALID_ARGUMENT;
    UNKNOWN when Triton itself refuses a stream, which comes without one."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Chunk(msgspec.Struct, frozen=True):
    """One response of a stream. finish_reason: "stop" or "length", on the last chunk only.

    logprobs: a token each, when asked for: {token id: {"logprob", "rank", "decoded_token"}}. prompt_logprobs: the
    same for the prompt's tokens, on the first chunk; the prompt's first token has none.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    num_input_tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_input_tokens: int
    cumulative_logprob: float
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def generation_inputs(prompt: Prompt, params: SamplingParams, stream: bool) -> list[InferInput]:
    """The tensors of one request to an LLM model. Raises ValueError on ids that are no 32-bit integers."""
    inputs = [_text("text_input", prompt)] if isinstance(prompt, str) else [_ids("input_ids", prompt)]
    inputs.append(_flag("stream", stream))
    inputs.append(_flag("exclude_input_in_output", True))
    inputs.append(_text("sampling_parameters", msgspec.json.encode(params).decode()))
    # `error`: a failure comes as an output with its code. Streamed gRPC errors have none, and the header that would add
    # one, triton_grpc_error, crashes tritonserver 2.51 when many requests fail at once.
    flags = ["finish_reason", "num_input_tokens", "cumulative_logprob", "error"]
    flags += [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None]
    return inputs + [_flag(f"return_{name}", True) for name in flags]


def text_inputs(text: str, add_special_tokens: bool) -> list[InferInput]:
    """The tensors that ask the tokenizer model for a text's ids."""
    return [_text("text_input", text), _flag("add_special_tokens", add_special_tokens)]


def chat_inputs(messages: Sequence[Message], template: Mapping[str, Any]) -> list[InferInput]:
    """The tensors that ask the tokenizer model for a chat's ids. template: tools, continue_final_message,
    add_generation_prompt and variables of the chat template."""
    inputs = [_text("messages", json.dumps(list(messages), ensure_ascii=False))]
    if template:
        inputs.append(_text("template_parameters", json.dumps(dict(template), ensure_ascii=False)))
    return inputs


def describe_inputs() -> list[InferInput]:
    """The tensors that ask an LLM model what it can hold."""
    return [_flag("describe", True)]


def max_model_len(result: InferResult) -> int | None:
    """Tokens that a model holds, of a response to `describe_inputs`; None for one that only says that it is over."""
    raw = result.as_numpy("description")
    return None if raw is None else int(json.loads(raw.reshape(-1)[0])["max_model_len"])


def ids_inputs(ids: Sequence[int], skip_special_tokens: bool) -> list[InferInput]:
    """The tensors that ask the tokenizer model for the text of ids."""
    return [_ids("token_ids", ids), _flag("skip_special_tokens", skip_special_tokens)]


def chunk_of(result: InferResult) -> Chunk | None:
    """The values of one response; None for the empty response that only says that the stream is over."""
    text = result.as_numpy("text_output")
    if text is None:
        return None
    reason = _one(result, "finish_reason", _NOT_FINISHED)
    ids = result.as_numpy("token_ids")
    return Chunk(
        text="".join([part.decode() for part in text.reshape(-1)]),
        token_ids=[] if ids is None else [int(i) for i in ids.reshape(-1)],
        finish_reason=None if reason == _NOT_FINISHED else reason,
        num_input_tokens=int(_one(result, "num_input_tokens", 0)),
        cumulative_logprob=float(_one(result, "cumulative_logprob", 0.0)),
        logprobs=json.loads(_one(result, "logprobs", "null")),
        prompt_logprobs=json.loads(_one(result, "prompt_logprobs", "null")),
    )


def failure_of(result: InferResult) -> ServerError | None:
    """What a response says in place of an answer."""
    raw = result.as_numpy("error")
    if raw is None:
        return None
    told = json.loads(raw.reshape(-1)[0])
    return ServerError(told["message"], _GRPC_NAMES.get(told["code"], told["code"]))


def joined(chunks: Sequence[Chunk]) -> Completion:
    """The chunks of one stream as a whole answer."""
    last = chunks[-1]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return Completion(
        text="".join([chunk.text for chunk in chunks]),
        token_ids=[i for chunk in chunks for i in chunk.token_ids],
        finish_reason=last.finish_reason or "stop",
        num_input_tokens=last.num_input_tokens,
        cumulative_logprob=last.cumulative_logprob,
        logprobs=logprobs if last.logprobs is not None else None,
        prompt_logprobs=chunks[0].prompt_logprobs,
    )


def server_error(error: InferenceServerException) -> ServerError:
    status = str(error.status() or "UNKNOWN").removeprefix("StatusCode.")
    return ServerError(str(error.message() or error), status)


def _one(result: InferResult, name: str, default: Any) -> Any:
    value = result.as_numpy(name)
    if value is None or not value.size:
        return default
    item = value.reshape(-1)[0]
    return item.decode() if isinstance(item, bytes) else item


def _text(name: str, text: str) -> InferInput:
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode("utf-8")], dtype=np.object_))
    return tensor


def _flag(name: str, value: bool) -> InferInput:
    tensor = InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def _ids(name: str, ids: Sequence[int]) -> InferInput:
    values = np.asarray(ids)
    if values.size and (values.dtype.kind not in "iu" or values.min() < -(2**31) or values.max() >= 2**31):
        raise ValueError(f"{name} must hold 32-bit integers")  # numpy would wrap them round or cut them off
    tensor = InferInput(name, [len(ids)], "INT32")
    tensor.set_data_from_numpy(values.astype(np.int32))
    return tensor
