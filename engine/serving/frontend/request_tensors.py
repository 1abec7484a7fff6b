"""A Triton request to a checked prompt, sampling parameters and a list of wanted outputs."""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.serving.frontend import sampling_fields, word_lists
from engine.serving.link import protocol
from engine.types import MAX_BIAS, MAX_BIASES, ErrorCode, RequestError, SamplingParams, shown

Array = npt.NDArray[Any]
_Sampling = tuple[SamplingParams, tuple[int, int]]  # with n and best_of

# Request parameters that belong to Triton, not to the model.
_TRITON_PARAMETERS = frozenset({"sequence_id", "sequence_start", "sequence_end", "binary_data_output", "timeout"})
_PARAMETERS = "request parameters"
_SAMPLING_TENSORS = frozenset({*protocol.SAMPLING_TENSORS, *protocol.NEUTRAL_TENSORS, protocol.END_ID})
_PERF_OUTPUTS = tuple(tensor.name for tensor in protocol.PERF_OUTPUTS)
_COMMON_BYTES = 512  # of a JSON text that is worth remembering


class Wanted(msgspec.Struct, frozen=True):
    """Which outputs a response carries. The stub of tritonserver 2.51 crashes on one that the client did not name."""

    text: bool = False
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    prompt_logprobs: bool = False
    error: bool = False
    token_ids: bool = False
    output_log_probs: bool = False
    sequence_index: bool = False
    output_ids: bool = False
    sequence_length: bool = False
    batch_index: bool = False
    perf: tuple[str, ...] = ()  # of PERF_OUTPUTS


class LlmRequest(msgspec.Struct, frozen=True):
    """What a client asked for. Exactly one of `text` and `input_ids` is set.

    echo: the answer is preceded by the prompt. top_logprobs: how many alternatives the logprobs output lists, None
    when the client did not ask for that list (`params.logprobs` may still be set for the sums). n: answers that come
    back, the likeliest of `best_of`; `separate`: each as responses of its own.
    biases: words, and what is added to the logits of their tokens. stop_ids, bad_ids: words as token ids.
    """

    text: bytes | None
    input_ids: array[int] | None
    stream: bool
    echo: bool
    params: SamplingParams
    wanted: Wanted
    top_logprobs: int | None
    n: int = 1
    best_of: int = 1
    separate: bool = False
    biases: tuple[tuple[str, float], ...] = ()
    stop_ids: word_lists.Words = ()
    bad_ids: word_lists.Words = ()


def llm_request(
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
    outputs: frozenset[str],
    timeout_us: int = 0,
    batched: bool = False,
) -> LlmRequest:
    """Check and combine everything that one request carries. Raises RequestError.

    tensors: the inputs by name. parameters: the request parameters. outputs: names that the client wants back.
    timeout_us: the request's own timeout, 0 for none. batched: it is one prompt of a batch.
    """
    _refuse(tensors)  # first: the request that stops another has no prompt
    text, input_ids = _prompt(tensors)
    stream = _flag(tensors, protocol.STREAM)
    exclude = tensors.get(protocol.EXCLUDE_INPUT)
    # TensorRT-LLM, whose requests bring ids or a batch dimension, streams new tokens only, whatever this flag says;
    # vllm_backend refuses.
    if stream and text is not None and not batched and exclude is not None and not bool(exclude.flat[0]):
        raise RequestError(protocol.STREAM_ECHO_REFUSAL)
    params, (n, best_of) = _sampling_params(tensors, parameters, timeout_us)
    echo = not stream and (exclude is None or not bool(exclude.flat[0]))
    # The answers of a beam search come at its end, as one response.
    stream = stream and params.beam_width == 1
    if stream and best_of > n:
        raise RequestError(f"best_of ({best_of}) above n ({n}) cannot be streamed: the best is known at the end")
    top_logprobs = params.logprobs
    log_probs = _flag(tensors, protocol.RETURN_LOG_PROBS)
    as_ids = protocol.INPUT_LENGTHS in tensors  # a client that names no outputs is not sent the same ids twice
    flagged: dict[str, Any] = {
        name: name in outputs and _flag(tensors, flag) for flag, name in protocol.RETURN_FLAGS.items()
    }
    wanted = Wanted(
        **flagged,
        text=protocol.TEXT_OUTPUT in outputs,
        token_ids=protocol.TOKEN_IDS in outputs,
        sequence_index=protocol.SEQUENCE_INDEX in outputs,
        batch_index=protocol.BATCH_INDEX in outputs and (batched or as_ids or protocol.BEAM_WIDTH in tensors),
        output_ids=as_ids and protocol.OUTPUT_IDS in outputs,
        sequence_length=as_ids and protocol.SEQUENCE_LENGTH in outputs,
        output_log_probs=log_probs and protocol.OUTPUT_LOG_PROBS in outputs,
    )
    if _flag(tensors, protocol.RETURN_PERF_METRICS):
        wanted = msgspec.structs.replace(wanted, perf=tuple(name for name in _PERF_OUTPUTS if name in outputs))
    if log_probs and protocol.CUMULATIVE_LOGPROB in outputs:
        wanted = msgspec.structs.replace(wanted, cumulative_logprob=True)
    if params.logprobs is None and (wanted.cumulative_logprob or wanted.output_log_probs or best_of > n):
        params = msgspec.structs.replace(params, logprobs=0)
    separate = protocol.NUM_RETURN_SEQUENCES in tensors
    biases = _biases(tensors)
    if not separate and wanted.sequence_index:
        wanted = msgspec.structs.replace(wanted, sequence_index=False)
    if protocol.EMBEDDING_BIAS in tensors:
        params = _with_bias(params, tensors[protocol.EMBEDDING_BIAS])
    stop_ids, bad_ids = (
        word_lists.unpacked(name, tensors[name]) if name in tensors else ()
        for name in (protocol.STOP_WORDS_LIST, protocol.BAD_WORDS_LIST)
    )
    asked = LlmRequest(text, input_ids, stream, echo, params, wanted, top_logprobs, n, best_of, separate, biases)
    return msgspec.structs.replace(asked, stop_ids=stop_ids, bad_ids=bad_ids) if stop_ids or bad_ids else asked


def as_one_response(asked: LlmRequest, prompts: int = 1) -> LlmRequest:
    """The request to a model that is not decoupled: all answers are entries of one response. Raises RequestError.

    prompts: how many prompts the request has.
    """
    if prompts > 1:
        raise RequestError(
            "this model sends one response a request, for it is not decoupled, and a batch has one a prompt: send one "
            "prompt a request, or call a model that is decoupled",
            ErrorCode.UNSUPPORTED,
        )
    if asked.stream:
        raise RequestError(
            "this model sends one response a request, for it is not decoupled: leave stream out, or call one that is",
            ErrorCode.UNSUPPORTED,
        )
    if not asked.separate:
        return asked
    wanted = msgspec.structs.replace(asked.wanted, sequence_index=False)
    return msgspec.structs.replace(asked, separate=False, wanted=wanted)


def parameters(request: Any) -> dict[str, Any]:
    """The parameters of a Triton request. Raises RequestError when they are too long."""
    text = request.parameters() or "{}"
    sampling_fields.check_size(_PARAMETERS, len(text))
    found: dict[str, Any] = json.loads(text)
    return found


def context(request: Any) -> int:
    """Tokens of a prompt and its answer that a request to a tokenizer model speaks of; 0 where it does not.

    Raises RequestError when that is no number of tokens."""
    value = parameters(request).get(protocol.MAX_MODEL_LEN, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"{protocol.MAX_MODEL_LEN} must be a number of tokens, not {shown(repr(value))}")
    return value


def wants_error(request: Any) -> bool:
    """Whether a Triton request asks for failures as an output; known even of a request that cannot be decoded."""
    flags = [tensor.as_numpy() for tensor in request.inputs() if tensor.name() == protocol.RETURN_ERROR]
    return any(flag.size and bool(flag.flat[0]) for flag in flags)


def wants_description(tensors: Mapping[str, Array]) -> bool:
    """Whether a request asks what the model can hold. Raises RequestError when it asks for anything else besides."""
    return _alone(tensors, protocol.DESCRIBE)


def wants_reset(tensors: Mapping[str, Array]) -> bool:
    """Whether a request is for an empty prefix cache. Raises RequestError when it asks for anything else besides."""
    return _alone(tensors, protocol.RESET_PREFIX_CACHE)


def _alone(tensors: Mapping[str, Array], name: str) -> bool:
    if not _flag(tensors, name):
        return False
    others = sorted(set(tensors) - {name, protocol.RETURN_ERROR})
    if others:
        raise RequestError(f"{name} stands alone: leave {', '.join(others)} out, or send {name} false")
    return True


def wants_text(request: Any) -> bool:
    """Whether a Triton request names the text among the outputs it wants."""
    return protocol.TEXT_OUTPUT in request.requested_output_names()


def one_text(tensors: Mapping[str, Array], name: str) -> bytes | None:
    """The single string in a tensor, None when it is not there. Raises RequestError when it is not single."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        raise RequestError(f"{name} must hold one string, not {tensor.size}")
    value = tensor.flat[0]
    return value if isinstance(value, bytes) else str(value).encode()


def token_ids(tensors: Mapping[str, Array], name: str) -> list[int] | None:
    tensor = tensors.get(name)
    return None if tensor is None else tensor.ravel().tolist()


def _refuse(tensors: Mapping[str, Array]) -> None:
    for name, tensor in tensors.items():
        if name in protocol.NEUTRAL_TENSORS:
            neutral, sentence = protocol.NEUTRAL_TENSORS[name]
            if tensor.flat[0] != neutral:
                raise RequestError(sentence, ErrorCode.UNSUPPORTED)


def _prompt(tensors: Mapping[str, Array]) -> tuple[bytes | None, array[int] | None]:
    text = one_text(tensors, protocol.TEXT_INPUT)
    tensor = tensors.get(protocol.INPUT_IDS)
    ids = None if tensor is None else array("i", tensor.astype(np.int32, copy=False).tobytes())
    if text is None and ids is None:
        raise RequestError("the request has no prompt: send text_input, one string, or input_ids")
    if text is not None and ids is not None:
        raise RequestError("the request has both text_input and input_ids: send one of them")
    if text == b"":
        raise RequestError("text_input is empty: send at least one character, or input_ids")
    if ids is not None and not ids:
        raise RequestError("input_ids is empty: send at least one token id")
    lengths = tensors.get(protocol.INPUT_LENGTHS)
    if lengths is not None:
        length, most = int(lengths.flat[0]), 0 if ids is None else len(ids)
        if not 1 <= length <= most:
            raise RequestError(f"input_lengths is {length}, and input_ids holds {most} tokens: send a number of these")
        ids = ids and ids[:length]
    return text, ids


def _sampling_params(tensors: Mapping[str, Array], parameters: Mapping[str, Any], timeout_us: int) -> _Sampling:
    raw = one_text(tensors, protocol.SAMPLING_PARAMETERS) or b""
    if parameters or timeout_us or len(raw) > _COMMON_BYTES or not _SAMPLING_TENSORS.isdisjoint(tensors):
        fields = _sampling_fields(tensors, parameters, timeout_us)
        return sampling_fields.build(fields), sampling_fields.answers(fields)
    return _common_params(raw)


@functools.lru_cache(256)
def _common_params(raw: bytes) -> _Sampling:
    """Of a JSON tensor alone: clients send the same few again and again."""
    fields = sampling_fields.parse_json(raw)
    return sampling_fields.build(fields), sampling_fields.answers(fields)


def _sampling_fields(tensors: Mapping[str, Array], parameters: Mapping[str, Any], timeout_us: int) -> dict[str, Any]:
    """Sampling fields out of the JSON tensor, TensorRT-LLM's tensors and the flat request parameters together.

    Of a field that comes several ways the first of these counts: clients of vllm_backend send JSON and parameters, and
    there the JSON wins. HTTP's generate endpoint makes tensors of request parameters that are named as one.
    """
    raw = one_text(tensors, protocol.SAMPLING_PARAMETERS)
    fields = {} if raw is None else sampling_fields.parse_json(raw)
    by_json = {sampling_fields.field_of(name) for name in fields}
    by_tensor: dict[str, Any] = {}
    for tensor, field in protocol.SAMPLING_TENSORS.items():
        if tensor in tensors and sampling_fields.field_of(field) not in by_json:
            by_tensor.setdefault(field, _scalar_or_strings(tensors[tensor], tensor))
    fields |= by_tensor
    if by_tensor.get("top_p") == 0.0:
        # TensorRT-LLM's clients send 0 for "not set"; with top_k 0 besides, or none, it is greedy there.
        del fields["top_p"]
        fields["top_k"] = 1 if fields.get("top_k") in (None, 0) else fields["top_k"]
    taken = {sampling_fields.field_of(name) for name in fields}
    for name, value in parameters.items():
        if name in _TRITON_PARAMETERS or name.startswith("triton_"):
            continue
        if name == "Streaming" and value is False:  # TensorRT-LLM's ids client says so of its unary calls
            continue
        if sampling_fields.field_of(name) not in taken:
            fields[name] = value
    if protocol.END_ID in tensors:
        end_id = int(tensors[protocol.END_ID].flat[0])
        fields["stop_token_ids"] = [*(fields.get("stop_token_ids") or ()), *([end_id] if end_id >= 0 else [])]
    timeout_us = timeout_us or _timeout_us(parameters)
    if timeout_us > 0 and "timeout_s" not in fields:
        fields["timeout_s"] = timeout_us / 1e6
    return fields


def _timeout_us(parameters: Mapping[str, Any]) -> int:
    """Triton's timeout as HTTP's generate endpoint hands it on, which alone does not take it for its own; 0 for none.

    Raises RequestError."""
    given = parameters.get("timeout", 0)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise RequestError(f"timeout must be a number of microseconds, not {shown(repr(given))}")
    return given


def _biases(tensors: Mapping[str, Array]) -> tuple[tuple[str, float], ...]:
    """TensorRT-LLM's embedding_bias_words with their weights. Raises RequestError."""
    given = [tensors.get(name) for name in (protocol.BIAS_WORDS, protocol.BIAS_WEIGHTS)]
    words, weights = given
    if words is None and weights is None:
        return ()
    if words is None or weights is None or words.size != weights.size:
        counts = [0 if tensor is None else tensor.size for tensor in given]
        raise RequestError(
            f"{protocol.BIAS_WORDS} has {counts[0]} words and {protocol.BIAS_WEIGHTS} {counts[1]} weights: one a word"
        )
    sampling_fields.check_count(protocol.BIAS_WORDS, words.size)
    sampling_fields.check_size(protocol.BIAS_WORDS, sum(map(len, words.flat)))
    if not np.all(np.abs(weights) <= MAX_BIAS):
        raise RequestError(f"{protocol.BIAS_WEIGHTS} must lie between {-MAX_BIAS:g} and {MAX_BIAS:g}")
    try:
        texts = [word.decode("utf-8") for word in words.flat]
    except UnicodeDecodeError as error:
        raise RequestError(f"{protocol.BIAS_WORDS} is not valid UTF-8 at byte {error.start}") from None
    return tuple(zip(texts, map(float, weights.flat), strict=True))


def _with_bias(params: SamplingParams, bias: Array) -> SamplingParams:
    """With TensorRT-LLM's embedding_bias, one value a token id, in the logit biases. Raises RequestError."""
    if not np.all(np.abs(bias) <= MAX_BIAS):
        raise RequestError(f"{protocol.EMBEDDING_BIAS} must lie between {-MAX_BIAS:g} and {MAX_BIAS:g}")
    tokens = np.flatnonzero(bias)
    name, count = protocol.EMBEDDING_BIAS, tokens.size
    if count > MAX_BIASES:
        raise RequestError(f"{name} has {count} values that are not 0; {MAX_BIASES} are allowed")
    found = {token: float(bias.flat[token]) + params.logit_bias.get(token, 0.0) for token in tokens.tolist()}
    together = params.logit_bias | found
    if len(together) > MAX_BIASES:
        raise RequestError(f"{name} and logit_bias: {len(together)} tokens together; {MAX_BIASES} are allowed")
    return msgspec.structs.replace(params, logit_bias=together)


def _scalar_or_strings(tensor: Array, name: str) -> Any:
    if tensor.dtype == object:
        sampling_fields.check_count(name, tensor.size)
        sampling_fields.check_size(name, sum(map(len, tensor.flat)))
        try:
            # TensorRT-LLM's clients send [""] where there is nothing to say.
            return [value.decode("utf-8") for value in tensor.ravel() if value]
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} is not valid UTF-8 at byte {error.start}") from None
    if tensor.size != 1:
        raise RequestError(f"{name} must hold one value, not {tensor.size}")
    value = tensor.flat[0]
    # The shortest decimal of a float32: 0.9 sent as FP32 is then the 0.9 of a JSON request, not 0.8999999761581421.
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def _flag(tensors: Mapping[str, Array], name: str) -> bool:
    tensor = tensors.get(name)
    return tensor is not None and bool(tensor.flat[0])
