"""TensorRT-LLM's models `preprocessing`, `tensorrt_llm` and `postprocessing` on the wire.

Names, types and shapes are those of NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm, of what a text
model takes: tensors of images, encoders, LoRA and draft models are not there, so the server refuses them by name.
`tensorrt_llm` is an ensemble of one step over the LLM, so no second engine; shapes are without the batch dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.serving.frontend import word_lists
from engine.serving.link import protocol
from engine.serving.link.protocol import Tensor
from engine.text import Tokenizer
from engine.types import MAX_BIAS, ErrorCode, RequestError

NAMES = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls", "ensemble")
MAX_BATCH = 64  # prompts of one request


_DECODER_QUERY = "DECODER_QUERY"

PREPROCESSING_INPUTS = (
    Tensor("QUERY", "STRING", optional=False),
    Tensor(_DECODER_QUERY, "STRING"),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", optional=False),
    Tensor("BAD_WORDS_DICT", "STRING", (-1,)),
    Tensor("STOP_WORDS_DICT", "STRING", (-1,)),
    Tensor("EMBEDDING_BIAS_WORDS", "STRING", (-1,)),
    Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,)),
    Tensor("END_ID", "INT32"),
    Tensor("PAD_ID", "INT32"),
)
PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("DECODER_INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_DECODER_INPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
    Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    Tensor("OUT_END_ID", "INT32"),
    Tensor("OUT_PAD_ID", "INT32"),
)
POSTPROCESSING_INPUTS = (
    Tensor("TOKENS_BATCH", "INT32", (-1, -1), optional=False),
    Tensor("SEQUENCE_LENGTH", "INT32", (-1,), optional=False),
)
POSTPROCESSING_OUTPUTS = (Tensor("OUTPUT", "STRING", (-1,)),)

# Input of `tensorrt_llm` -> the LLM's where the names differ.
_RENAMED = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": protocol.STREAM,
    "stop": "stop_request",
}
_SAME = (
    protocol.INPUT_IDS,
    protocol.INPUT_LENGTHS,
    protocol.NUM_RETURN_SEQUENCES,
    protocol.END_ID,
    "pad_id",
    protocol.STOP_WORDS_LIST,
    protocol.BAD_WORDS_LIST,
    protocol.EMBEDDING_BIAS,
    protocol.BEAM_WIDTH,
    "temperature",
    "repetition_penalty",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    protocol.RETURN_LOG_PROBS,
    "return_context_logits",
    "return_generation_logits",
    protocol.RETURN_PERF_METRICS,
    "return_num_input_tokens",
    "return_num_output_tokens",
    protocol.EXCLUDE_INPUT,
    protocol.GUIDE_TYPE,
    protocol.GUIDE,
)
_NEEDED = (protocol.INPUT_IDS, protocol.INPUT_LENGTHS, "request_output_len")
INPUT_MAP = {**{name: name for name in _SAME}, **_RENAMED}
OUTPUT_MAP = {
    protocol.OUTPUT_IDS: protocol.OUTPUT_IDS,
    protocol.SEQUENCE_LENGTH: protocol.SEQUENCE_LENGTH,
    "cum_log_probs": protocol.CUMULATIVE_LOGPROB,
    **{
        name: name
        for name in (
            protocol.OUTPUT_LOG_PROBS,
            protocol.SEQUENCE_INDEX,
            protocol.BATCH_INDEX,
            protocol.NUM_INPUT_TOKENS,
            protocol.NUM_OUTPUT_TOKENS,
        )
    },
    **{tensor.name: tensor.name for tensor in (*protocol.REFUSED_OUTPUTS, *protocol.PERF_OUTPUTS)},
}


def _named(table: Iterable[Tensor], names: Mapping[str, str]) -> tuple[Tensor, ...]:
    known = {tensor.name: tensor for tensor in table}
    return tuple(
        Tensor(name, known[source].dtype, known[source].dims, name not in _NEEDED) for name, source in names.items()
    )


INPUTS = _named(protocol.LLM_INPUTS, INPUT_MAP)
OUTPUTS = _named(protocol.LLM_OUTPUTS, OUTPUT_MAP)


def preprocess(tensors: Mapping[str, Any], tokenizer: Tokenizer, end_id: int) -> dict[str, npt.NDArray[Any]]:
    """Token ids of a batch of prompts and of its words; tensors are `[b, …]`. end_id: where the request has none, -1 is
    none. Raises RequestError."""
    if _DECODER_QUERY in tensors:
        raise RequestError(f"{_DECODER_QUERY} belongs to models with an encoder: leave it out", ErrorCode.UNSUPPORTED)
    ids = [tokenizer.encode(text) for text in tensors["QUERY"].ravel()]
    count = len(ids)
    default = np.full((count, 1), end_id, np.int32)
    pad = tensors.get("PAD_ID", default)
    filled = np.zeros((count, max(map(len, ids))), np.int32)
    for row, prompt, fill in zip(filled, ids, pad.ravel(), strict=True):
        row[:] = fill
        row[: len(prompt)] = prompt
    words = {
        f"{name}_IDS": word_lists.packed(_words(tensors.get(f"{name}_DICT"), count, tokenizer))
        for name in ("BAD_WORDS", "STOP_WORDS")
    }
    return {
        "INPUT_ID": filled,
        "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in ids], np.int32),
        "DECODER_INPUT_ID": np.array(pad, np.int32),
        "REQUEST_DECODER_INPUT_LEN": np.ones((count, 1), np.int32),
        **words,
        "EMBEDDING_BIAS": _bias(tensors, count, tokenizer),
        "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"],
        "OUT_END_ID": tensors.get("END_ID", default),
        "OUT_PAD_ID": np.array(pad, np.int32),
    }


def postprocess(tensors: Mapping[str, Any], tokenizer: Tokenizer) -> npt.NDArray[np.object_]:
    """The texts, STRING [b * beams], of TOKENS_BATCH [b, beams, n] up to SEQUENCE_LENGTH [b, beams]. Raises
    RequestError."""
    ids, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
    if ids.shape[:2] != lengths.shape:
        raise RequestError(f"TOKENS_BATCH has {list(ids.shape[:2])} sequences, SEQUENCE_LENGTH {list(lengths.shape)}")
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= ids.shape[2]:
        raise RequestError(f"SEQUENCE_LENGTH must lie between 0 and the {ids.shape[2]} tokens of TOKENS_BATCH")
    rows = zip(ids.reshape(-1, ids.shape[2]), lengths.ravel(), strict=True)
    texts = [tokenizer.decode(row[:length].tolist()).encode("utf-8") for row, length in rows]
    return np.array(texts, np.object_)


def _words(array: npt.NDArray[Any] | None, count: int, tokenizer: Tokenizer) -> Sequence[Sequence[Sequence[int]]]:
    if array is None:
        return [[] for _ in range(count)]
    return [[tokenizer.encode(word, add_special_tokens=False) for word in row.ravel()] for row in array]


def _bias(tensors: Mapping[str, Any], count: int, tokenizer: Tokenizer) -> npt.NDArray[np.float32]:
    """FP32 [b, vocabulary], or [b, 0] where no words came."""
    words, weights = tensors.get("EMBEDDING_BIAS_WORDS"), tensors.get("EMBEDDING_BIAS_WEIGHTS")
    if words is None and weights is None:
        return np.zeros((count, 0), np.float32)
    if words is None or weights is None or words.shape != weights.shape:
        raise RequestError("EMBEDDING_BIAS_WORDS needs one weight a word in EMBEDDING_BIAS_WEIGHTS, and these words")
    if not np.all(np.abs(weights) <= MAX_BIAS):
        raise RequestError(f"EMBEDDING_BIAS_WEIGHTS must lie between {-MAX_BIAS:g} and {MAX_BIAS:g}")
    found = np.zeros((count, tokenizer.vocab_size), np.float32)
    for row, some, weight in zip(found, _words(words, count, tokenizer), weights, strict=True):
        for word, value in zip(some, weight, strict=True):
            np.add.at(row, word, value)
    return found
