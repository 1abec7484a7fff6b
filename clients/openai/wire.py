"""Requests to Triton and what it answers, as the shim knows them. Every tensor name of this package stands here."""

from __future__ import annotations

import functools
import itertools
import logging
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2

from clients.openai.errors import BackendError
from engine.text import TemplateMarks

log = logging.getLogger("nereid.openai")

_LLM_INPUTS = {"text_input", "input_ids", "sampling_parameters", "stream"}
_TOKENIZER_INPUTS = {"text_input", "messages", "template_parameters", "token_ids"}
_NOT_FINISHED = b"None"
_TIMED_OUT = "ran past its timeout"  # Triton has no code for it; another replica must not be asked
_UNREACHABLE = "The model's server cannot be reached or is going away; try again in a moment."
_DEAD_INSTANCE = "is not healthy"  # "Stub process 'demo_1_0' is not healthy.": the model has others, or will soon
# A model's own words; what else the server says of an inner failure may be a trace with the names of its files.
_OWN = "its log says why under the id"
_TRUE, _FALSE = b"\x01", b"\x00"

_parse = service_pb2.ModelStreamInferResponse.FromString
_length = struct.Struct("<I").unpack_from
_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue: text that the model tokenizes, or ids. `key` is what prefix affinity compares.

    salt: of the prefix cache.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    affinity: str | None = None
    salt: str | None = None

    @property
    def key(self) -> bytes:
        salt = b"" if self.salt is None else b"\0" + self.salt.encode() + b"\0"
        if self.affinity is not None:
            return salt + b"\0" + self.affinity.encode()
        return salt + (np.asarray(self.ids, np.int32).tobytes() if self.ids is not None else (self.text or "").encode())


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to an LLM model. `sampling` is sent as the JSON tensor sampling_parameters, with what is left until
    `deadline` (on the monotonic clock) as its timeout.

    index: its place among the generations of one HTTP request. answers: how many come, all at the end where there are
    several: those of a beam search. trace: the context of its trace.
    """

    model: str
    request_id: str
    prompt: Prompt
    sampling: dict[str, Any]
    stream: bool
    deadline: float
    logprobs: bool = False
    cumulative: bool = False
    prompt_logprobs: bool = False
    index: int = 0
    answers: int = 1
    trace: Mapping[str, str] = field(default_factory=dict)


class Piece(msgspec.Struct, frozen=True):
    """One response of an LLM model: the text and tokens since the one before.

    index: of its answer among those of one HTTP request.
    logprobs: one {token id: {logprob, rank, decoded_token}} a token, the chosen token first.
    finish_reason is set on the last piece.
    """

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    num_input: int = 0
    num_cached: int = 0
    index: int = 0
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An LLM model of a repository and the model that tokenizes for it (None: text cannot be templated).

    describes: it can be asked for what follows; None: not known. resets: its prefix cache can be emptied.
    max_model_len: tokens that a request may hold, prompt and answer.
    template: what its chat template shows of the answers. sampling: its own, by fields of sampling parameters.
    served_names: its other names in this API. problem: why requests would wait now; empty when they would not.
    """

    name: str
    tokenizer: str | None = None
    max_model_len: int | None = None
    describes: bool = False
    template: TemplateMarks | None = None
    resets: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    served_names: tuple[str, ...] = ()
    problem: str = ""

    def described(self, found: Description) -> ModelInfo:
        return replace(
            self,
            max_model_len=found.max_model_len,
            template=found.template,
            sampling=found.sampling,
            served_names=found.served_names,
            problem=found.problem,
        )


class Description(msgspec.Struct, frozen=True):
    """What a model says of itself; servers of before say less."""

    max_model_len: int
    template: TemplateMarks | None = None
    sampling: dict[str, float | int] = {}
    served_names: tuple[str, ...] = ()
    problem: str = ""


def llm_request(generation: Generation, timeout_s: float) -> Any:
    """The message that starts a generation."""
    prompt = generation.prompt
    request = service_pb2.ModelInferRequest()
    request.CopyFrom(
        _llm_template(generation.stream, generation.logprobs, generation.cumulative, generation.prompt_logprobs)
    )
    if generation.answers > 1:
        add_flag(request, "return_num_output_tokens", True)
        request.outputs.add(name="num_output_tokens")
    for name, value in generation.trace.items():
        request.parameters[name].string_param = value
    request.model_name = generation.model
    request.id = generation.request_id
    _add(request, "sampling_parameters", "BYTES", _string(_ENCODE({**generation.sampling, "timeout_s": timeout_s})))
    if prompt.ids is not None:
        add_ids(request, "input_ids", prompt.ids)
    else:
        add_text(request, "text_input", (prompt.text or "").encode())
    return request


@functools.cache
def _llm_template(stream: bool, logprobs: bool, cumulative: bool, prompt_logprobs: bool) -> Any:
    """What all requests of one kind have in common."""
    request = service_pb2.ModelInferRequest()
    add_flag(request, "stream", stream)
    add_flag(request, "exclude_input_in_output", True)
    # return_error, not Triton's triton_grpc_error header, the other way to have codes: 2.51 crashes under it.
    flags = ["finish_reason", "num_input_tokens", "num_cached_tokens", "error"]
    extras = {"logprobs": logprobs, "cumulative_logprob": cumulative, "prompt_logprobs": prompt_logprobs}
    flags += [name for name, wanted in extras.items() if wanted]
    for name in flags:
        add_flag(request, f"return_{name}", True)
    for name in ("text_output", "token_ids", *flags):
        request.outputs.add(name=name)
    return request


def describe_request(model: str) -> Any:
    """The message that asks an LLM model what it can hold."""
    request = service_pb2.ModelInferRequest(model_name=model)
    add_flag(request, "describe", True)
    request.outputs.add(name="description")
    return request


def reset_request(model: str) -> Any:
    """The message that has an LLM model empty its prefix cache."""
    request = service_pb2.ModelInferRequest(model_name=model)
    add_flag(request, "reset_prefix_cache", True)
    request.outputs.add(name="description")
    return request


def reset_failure(message: bytes) -> BackendError | None:
    """Why a prefix cache was not emptied, in the server's words."""
    error = _parse(message).error_message
    return from_status("INTERNAL", error) if error else None


def read_description(message: bytes) -> Description | None:
    """None when there is none in the message."""
    found = tensors(_parse(message).infer_response)
    if "description" not in found:
        return None
    return msgspec.json.decode(first_string(found["description"]), type=Description)


def unary_request(model: str) -> Any:
    """A message to a model with one response; its tensors are added to it."""
    return service_pb2.ModelInferRequest(model_name=model)


def add_flag(request: Any, name: str, value: bool) -> None:
    _add(request, name, "BOOL", _TRUE if value else _FALSE)


def add_text(request: Any, name: str, text: bytes) -> None:
    """text: UTF-8."""
    _add(request, name, "BYTES", _string(text))


def add_ids(request: Any, name: str, ids: Sequence[int]) -> None:
    _add(request, name, "INT32", np.asarray(ids, np.int32).tobytes(), len(ids))


def _add(request: Any, name: str, dtype: str, raw: bytes, length: int = 1) -> None:
    request.inputs.add(name=name, datatype=dtype, shape=[length])
    request.raw_input_contents.append(raw)


def _string(data: bytes) -> bytes:
    """One element of a serialized BYTES tensor: a 4-byte little-endian length before it."""
    return struct.pack("<I", len(data)) + data


class PieceReader:
    """Responses of one streamed call as pieces. It runs once a token, so it looks at names only when their number
    changes: a model sends the same outputs in the same order, or an error."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._count = -1
        self._places: dict[str, int] = {}
        self.failure: BackendError | None = None
        self.finished = False

    def read(self, message: bytes) -> Piece | None:
        """The piece in a serialized ModelStreamInferResponse; None for an error, which is `failure` then."""
        response = _parse(message)
        if response.error_message:
            self.failure = from_status("INTERNAL", response.error_message)
            return None
        inner = response.infer_response
        if len(inner.outputs) != self._count:
            self._count = len(inner.outputs)
            self._places = {output.name: place for place, output in enumerate(inner.outputs)}
        raw, places = inner.raw_output_contents, self._places
        if "error" in places:
            self.failure = read_failure(raw[places["error"]])
            return None
        if "token_ids" not in places:
            return None  # the empty response that only says that the stream is over
        ids = raw[places["token_ids"]]
        reason = raw[places["finish_reason"]][4:]
        finish = None if reason == _NOT_FINISHED else reason.decode()
        self.finished = self.finished or finish is not None
        piece = (
            raw[places["text_output"]][4:].decode("utf-8", "replace"),
            struct.unpack(f"<{len(ids) // 4}i", ids),
            finish,
            _length(raw[places["num_input_tokens"]])[0],
            _length(raw[places["num_cached_tokens"]])[0],
            self._index,
        )
        if len(places) == 5:
            return Piece(*piece)
        return Piece(
            *piece,
            logprobs=_json(raw, places, "logprobs"),
            prompt_logprobs=_json(raw, places, "prompt_logprobs"),
            cumulative_logprob=(
                struct.unpack_from("<f", raw[places["cumulative_logprob"]])[0]
                if "cumulative_logprob" in places
                else 0.0
            ),
        )


class AnswersReader(PieceReader):
    """The one response of a generation with several answers as a piece each."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation.index * generation.answers)
        self.first = generation.index * generation.answers

    def read_all(self, message: bytes) -> list[Piece]:
        """The answers in a serialized ModelStreamInferResponse; none for an error, which is `failure` then."""
        inner = _parse(message).infer_response
        found = tensors(inner)
        if "num_output_tokens" not in found:
            piece = self.read(message)
            return [] if piece is None else [piece]
        self.finished = True
        counts = np.frombuffer(found["num_output_tokens"], np.uint32)
        ends = np.cumsum(counts)
        ids = np.frombuffer(found["token_ids"], np.int32).tolist()
        logprobs = _strings(found["logprobs"]) if "logprobs" in found else [b"null"] * len(counts)
        told = zip(_strings(found["text_output"]), _strings(found["finish_reason"]), logprobs, strict=True)
        return [
            Piece(
                text.decode("utf-8", "replace"),
                ids[end - count : end],
                reason.decode(),
                _length(found["num_input_tokens"])[0],
                _length(found["num_cached_tokens"])[0],
                self.first + place,
                logprobs=msgspec.json.decode(entries),
            )
            for place, ((text, reason, entries), count, end) in enumerate(zip(told, counts, ends, strict=True))
        ]


def _strings(raw: bytes) -> list[bytes]:
    """The elements of a serialized BYTES tensor."""
    found, at = [], 0
    while at < len(raw):
        (length,) = _length(raw, at)
        found.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def _json(raw: Sequence[bytes], places: Mapping[str, int], name: str) -> Any:
    return msgspec.json.decode(raw[places[name]][4:]) if name in places else None


def from_status(code: str, message: str) -> BackendError:
    """What Triton or gRPC says of a call. code: gRPC's name of the status."""
    if code in ("OK", "UNKNOWN"):
        code = "INTERNAL"
    if code == "DEADLINE_EXCEEDED":
        return BackendError(code, "The request ran past its timeout: the model's server said nothing.", detail=message)
    if _DEAD_INSTANCE in message:
        return BackendError("UNAVAILABLE", _UNREACHABLE, detail=message, again=True)
    if code == "INTERNAL" and "unknown model" in message.lower():
        code = "UNAVAILABLE"  # it was there at the last look: it is being unloaded or has just failed
    if code == "UNAVAILABLE":
        return BackendError(code, _UNREACHABLE, detail=message)
    if code == "INTERNAL" and _OWN not in message:
        number = uuid.uuid4().hex[:12]
        log.error("a model's server failed on a request (id %s): %s", number, message)
        return BackendError(code, f"The model's server failed on this request; {_OWN} {number}.", detail=message)
    return BackendError(code, message)


def read_failure(raw: bytes) -> BackendError:
    """Why a request failed, out of the tensor `error`."""
    told = msgspec.json.decode(raw[4:])
    code = "DEADLINE_EXCEEDED" if _TIMED_OUT in told["message"] else told["code"]
    return BackendError(code, told["message"], refused=True)


def tensors(response: Any) -> dict[str, bytes]:
    """The serialized outputs of a ModelInferResponse by name."""
    return dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=False))


def first_string(raw: bytes) -> str:
    """The first element of a serialized BYTES tensor."""
    (length,) = _length(raw)
    return raw[4 : 4 + length].decode("utf-8", "replace")


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
        has = inputs[config.name]
        found[config.name] = ModelInfo(
            config.name, tokenizer, describes="describe" in has, resets="reset_prefix_cache" in has
        )
    return found
