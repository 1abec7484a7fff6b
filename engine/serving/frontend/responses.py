"""What goes back to Triton: tensors by the wire table, errors as vllm_backend sends them."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.serving.frontend.stream import Piece, Stream
from engine.serving.link import protocol
from engine.types import ErrorCode, TokenLogprobs

logger = logging.getLogger("nereid.frontend")


def unexpected(logger: logging.Logger) -> str:
    """What a client is told of the exception that is being handled: the log has its trace, under the same id. A trace
    would show the server's files to everybody."""
    number = uuid.uuid4().hex[:12]
    logger.exception("a request failed (id %s)", number)
    return f"the server failed on this request; its log says why under the id {number}"


_PERF_DTYPES = {
    t.name: {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[t.dtype] for t in protocol.PERF_OUTPUTS
}
_BATCHED_NAMES = {source: name for name, source in protocol.ENSEMBLE_OUTPUT_MAP.items()}


class Responses:
    """Builds responses. pb: the Python backend's `triton_python_backend_utils`, which exists only in a stub.

    batched: outputs have the ensemble's names and a batch dimension of 1, but for the text, as TensorRT-LLM's clients
    read them.
    """

    def __init__(self, pb: Any, batched: bool = False) -> None:
        self._pb = pb
        self._batched = batched
        self._final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._codes = {
            ErrorCode.INVALID_ARG: pb.TritonError.INVALID_ARG,
            ErrorCode.UNAVAILABLE: pb.TritonError.UNAVAILABLE,
            ErrorCode.UNSUPPORTED: pb.TritonError.UNSUPPORTED,
            ErrorCode.NOT_FOUND: pb.TritonError.NOT_FOUND,
            ErrorCode.INTERNAL: pb.TritonError.INTERNAL,
            ErrorCode.CANCELLED: pb.TritonError.CANCELLED,
        }

    def send(self, answers: Sequence[tuple[Stream, Piece]], last: bool) -> None:
        """Send one response with a piece of each answer in it. last: the request's last, which has the final flag."""
        stream, piece = answers[0]
        if piece.error is not None:
            wanted = stream.request.wanted
            self.send_error(stream.sender, piece.error, piece.error_code, wanted.error, wanted.text)
        elif last:
            stream.sender.send(self._response(answers), flags=self._final)
        else:
            stream.sender.send(self._response(answers))

    def send_error(self, sender: Any, sentence: str, code: ErrorCode, as_output: bool, with_text: bool) -> None:
        """Fail a request: its only or its last response. as_output: in the tensor `error`, with its code."""
        text = "" if as_output else protocol.ERROR_TEXT
        tensors = [self._strings(protocol.TEXT_OUTPUT, [text])] if with_text else []
        error = None if as_output else self._pb.TritonError(sentence, self._codes[code])
        if as_output:
            described = json.dumps({"code": code.value, "message": sentence})
            tensors.append(self._strings(protocol.ERROR, [described]))
        self._tell(sender, self._pb.InferenceResponse(output_tensors=tensors, error=error))

    def send_description(self, sender: Any, description: dict[str, Any]) -> None:
        """Answer a request for the model's description: its only response."""
        tensors = [self._strings(protocol.DESCRIPTION, [json.dumps(description)])]
        self._tell(sender, self._pb.InferenceResponse(output_tensors=tensors))

    def _tell(self, sender: Any, response: Any) -> None:
        """Send an only or a last response. What cannot be sent, as when shared memory is full, is in the log: whoever
        calls has other requests."""
        try:
            sender.send(response, flags=self._final)
        except Exception:
            logger.exception("a client could not be answered")

    def _response(self, answers: Sequence[tuple[Stream, Piece]]) -> Any:
        """Outputs have an entry an answer, as vllm_backend's; `token_ids` has those of all, one behind the other."""
        first = answers[0][0]
        wanted = first.request.wanted
        pieces = [piece for _, piece in answers]
        tensors = []
        if wanted.text:
            before = "" if first.request.stream else first.echo_text()
            tensors.append(self._strings(protocol.TEXT_OUTPUT, [before + piece.text for piece in pieces]))
        if wanted.token_ids:
            ids = pieces[0].token_ids if len(pieces) == 1 else [i for piece in pieces for i in piece.token_ids]
            tensors.append(self._tensor(protocol.TOKEN_IDS, ids, np.int32))
        if wanted.output_ids or wanted.sequence_length:
            tensors += self._sequences(first, pieces)
        if wanted.finish_reason:
            reasons = [piece.finish_reason for piece in pieces]
            told = [protocol.NOT_FINISHED if reason is None else reason.value for reason in reasons]
            tensors.append(self._strings(protocol.FINISH_REASON, told))
        if wanted.cumulative_logprob:
            sums = [piece.cumulative_logprob for piece in pieces]
            tensors.append(self._tensor(protocol.CUMULATIVE_LOGPROB, sums, np.float32))
        if wanted.logprobs:
            entries = [logprobs_json(stream, piece.logprobs) for stream, piece in answers]
            tensors.append(self._strings(protocol.LOGPROBS, entries))
        if wanted.num_input_tokens:
            tensors.append(self._tensor(protocol.NUM_INPUT_TOKENS, [len(first.prompt_ids)], np.uint32))
        if wanted.num_output_tokens:
            counts = [len(piece.token_ids) for piece in pieces]
            tensors.append(self._tensor(protocol.NUM_OUTPUT_TOKENS, counts, np.uint32))
        if wanted.num_cached_tokens:
            tensors.append(self._tensor(protocol.NUM_CACHED_TOKENS, [first.num_cached], np.uint32))
        if wanted.prompt_logprobs:
            tensors.append(self._strings(protocol.PROMPT_LOGPROBS, [prompt_logprobs_json(first.siblings[0])]))
        if wanted.output_log_probs:
            longest = max(len(piece.logprobs) for piece in pieces)
            chosen = [[entry.logprobs[0] for entry in piece.logprobs] for piece in pieces]
            padded = [values + [0.0] * (longest - len(values)) for values in chosen]
            tensors.append(self._tensor(protocol.OUTPUT_LOG_PROBS, padded, np.float32))
        if wanted.sequence_index:
            tensors.append(self._tensor(protocol.SEQUENCE_INDEX, [first.index], np.int32))
        if wanted.batch_index:
            tensors.append(self._tensor(protocol.BATCH_INDEX, [first.batch_index], np.int32))
        if wanted.perf:
            found = perf_metrics([stream for stream, _ in answers])
            tensors += [self._tensor(name, [found[name]], _PERF_DTYPES[name]) for name in wanted.perf]
        return self._pb.InferenceResponse(output_tensors=tensors)

    def _sequences(self, first: Stream, pieces: Sequence[Piece]) -> list[Any]:
        """TensorRT-LLM's form of the ids, a line an answer, and the lines' lengths."""
        wanted = first.request.wanted
        before = list(first.prompt_ids) if first.request.echo else []
        lines = [[*before, *piece.token_ids] for piece in pieces]
        longest = max(map(len, lines))
        found = []
        if wanted.output_ids:
            padded = [line + [0] * (longest - len(line)) for line in lines]
            found.append(self._tensor(protocol.OUTPUT_IDS, padded, np.int32))
        if wanted.sequence_length:
            found.append(self._tensor(protocol.SEQUENCE_LENGTH, [len(line) for line in lines], np.int32))
        return found

    def _strings(self, name: str, values: list[str]) -> Any:
        array = np.array([v.encode("utf-8") for v in values], dtype=np.object_)
        return self._pb.Tensor(name, array[None] if self._batched and name != protocol.TEXT_OUTPUT else array)

    def _tensor(self, name: str, values: list[Any], dtype: Any) -> Any:
        array = np.array(values, dtype=dtype)
        if not self._batched:
            return self._pb.Tensor(name, array)
        return self._pb.Tensor(_BATCHED_NAMES.get(name, name), array[None])


def perf_metrics(streams: Sequence[Stream]) -> dict[str, float]:
    """TensorRT-LLM's figures of a response's answers so far, by output: blocks and drafts of all, the first moments and
    the last token's. Moments are this process's; blocks and drafts of a beam search are 0, which keeps no count."""
    used = [stream.usage for stream in streams]
    blocks, cached = sum(one.blocks for one in used), sum(one.cached_blocks for one in used)
    drafted, accepted = sum(one.draft_tokens for one in used), sum(one.accepted_tokens for one in used)
    heard = [stream for stream in streams if stream.first_heard] or list(streams)
    moments = {
        "arrival": min(stream.arrived for stream in streams),
        "first_scheduled": min(stream.first_heard - stream.waited[1] for stream in heard),
        "first_token": min(stream.first_heard for stream in heard),
        "last_token": max(stream.heard for stream in heard),
    }
    return {
        "kv_cache_alloc_new_blocks": blocks - cached,
        "kv_cache_reused_blocks": cached,
        "kv_cache_alloc_total_blocks": blocks,
        **{f"{name}_time_ns": int(seconds * 1e9) for name, seconds in moments.items()},
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "total_accepted_draft_tokens": accepted,
        "total_draft_tokens": drafted,
    }


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
