"""What goes back to Triton: tensors by the wire table, errors as vllm_backend sends them."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

import numpy as np

from engine.serving import protocol
from engine.serving.stream import Piece, Stream
from engine.types import ErrorCode, TokenLogprobs


def unexpected(logger: logging.Logger) -> str:
    """What a client is told of the exception that is being handled: the log has its trace, under the same id. A trace
    would show the server's files to everybody."""
    number = uuid.uuid4().hex[:12]
    logger.exception("a request failed (id %s)", number)
    return f"the server failed on this request; its log says why under the id {number}"


class Responses:
    """Builds responses. pb: the Python backend's `triton_python_backend_utils`, which exists only in a stub."""

    def __init__(self, pb: Any) -> None:
        self._pb = pb
        self._final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._codes = {
            ErrorCode.INVALID_ARG: pb.TritonError.INVALID_ARG,
            ErrorCode.UNAVAILABLE: pb.TritonError.UNAVAILABLE,
            ErrorCode.UNSUPPORTED: pb.TritonError.UNSUPPORTED,
            ErrorCode.NOT_FOUND: pb.TritonError.NOT_FOUND,
            ErrorCode.INTERNAL: pb.TritonError.INTERNAL,
            ErrorCode.CANCELLED: pb.TritonError.CANCELLED,
        }

    def send(self, stream: Stream, piece: Piece) -> None:
        """Send one response; the last one of a request carries the final flag itself."""
        if piece.error is not None:
            wanted = stream.request.wanted
            self.send_error(stream.sender, piece.error, piece.error_code, wanted.error, wanted.text)
        elif piece.finish_reason is not None:
            stream.sender.send(self._response(stream, piece), flags=self._final)
        else:
            stream.sender.send(self._response(stream, piece))

    def send_error(self, sender: Any, sentence: str, code: ErrorCode, as_output: bool, with_text: bool) -> None:
        """Fail a request: its only or its last response. as_output: in the tensor `error`, with its code."""
        text = "" if as_output else protocol.ERROR_TEXT
        tensors = [self._strings(protocol.TEXT_OUTPUT, [text])] if with_text else []
        error = None if as_output else self._pb.TritonError(sentence, self._codes[code])
        if as_output:
            described = json.dumps({"code": code.value, "message": sentence})
            tensors.append(self._strings(protocol.ERROR, [described]))
        sender.send(self._pb.InferenceResponse(output_tensors=tensors, error=error), flags=self._final)

    def send_description(self, sender: Any, description: dict[str, Any]) -> None:
        """Answer a request for the model's description: its only response."""
        tensors = [self._strings(protocol.DESCRIPTION, [json.dumps(description)])]
        sender.send(self._pb.InferenceResponse(output_tensors=tensors), flags=self._final)

    def _response(self, stream: Stream, piece: Piece) -> Any:
        wanted = stream.request.wanted
        text = piece.text if stream.request.stream else stream.echo_text() + piece.text
        tensors = [self._strings(protocol.TEXT_OUTPUT, [text])] if wanted.text else []
        if wanted.token_ids:
            tensors.append(self._tensor(protocol.TOKEN_IDS, piece.token_ids, np.int32))
        if wanted.finish_reason:
            reason = protocol.NOT_FINISHED if piece.finish_reason is None else piece.finish_reason.value
            tensors.append(self._strings(protocol.FINISH_REASON, [reason]))
        if wanted.cumulative_logprob:
            tensors.append(self._tensor(protocol.CUMULATIVE_LOGPROB, [piece.cumulative_logprob], np.float32))
        if wanted.logprobs:
            tensors.append(self._strings(protocol.LOGPROBS, [logprobs_json(stream, piece.logprobs)]))
        if wanted.num_input_tokens:
            tensors.append(self._tensor(protocol.NUM_INPUT_TOKENS, [len(stream.prompt_ids)], np.uint32))
        if wanted.num_output_tokens:
            tensors.append(self._tensor(protocol.NUM_OUTPUT_TOKENS, [len(piece.token_ids)], np.uint32))
        if wanted.num_cached_tokens:
            tensors.append(self._tensor(protocol.NUM_CACHED_TOKENS, [stream.num_cached], np.uint32))
        if wanted.prompt_logprobs:
            tensors.append(self._strings(protocol.PROMPT_LOGPROBS, [prompt_logprobs_json(stream)]))
        if wanted.output_log_probs:
            chosen = [[entry.logprobs[0] for entry in piece.logprobs]]
            tensors.append(self._tensor(protocol.OUTPUT_LOG_PROBS, chosen, np.float32))
        return self._pb.InferenceResponse(output_tensors=tensors)

    def _strings(self, name: str, values: list[str]) -> Any:
        return self._pb.Tensor(name, np.array([v.encode("utf-8") for v in values], dtype=np.object_))

    def _tensor(self, name: str, values: list[Any], dtype: Any) -> Any:
        return self._pb.Tensor(name, np.array(values, dtype=dtype))


def logprobs_json(stream: Stream, entries: list[TokenLogprobs]) -> str:
    """vllm_backend's form: a list with one object a token, {token id: {logprob, rank, decoded_token}}; "null" when the
    request's sampling parameters do not ask for logprobs."""
    if stream.request.top_logprobs is None:
        return "null"
    return json.dumps([_entry(stream, entry) for entry in entries])


def prompt_logprobs_json(stream: Stream) -> str:
    """The prompt's log-probabilities in the same form, one entry a prompt token (null for the first, which nothing
    precedes), once; "null" on the other responses and when they were not asked for."""
    entries, stream.prompt_logprobs = stream.prompt_logprobs, None
    if entries is None:
        return "null"
    return json.dumps([None if entry is None else _entry(stream, entry) for entry in entries])


def _entry(stream: Stream, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
    """One position. A token that is a part of a character has its bytes besides: its text shows U+FFFD."""
    found: dict[str, dict[str, Any]] = {}
    for i, value, rank in zip(entry.ids, entry.logprobs, entry.ranks, strict=True):
        text = stream.decoded_token(i)
        found[str(i)] = {"logprob": value, "rank": rank, "decoded_token": text}
        if "\ufffd" in text and (data := stream.token_bytes(i)) is not None:
            found[str(i)]["bytes"] = list(data)
    return found
