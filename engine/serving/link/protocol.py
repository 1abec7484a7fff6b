"""Every name on the wire, once: tensors of the LLM model, the tokenizer and the ensemble.

config.pbtxt files are written from these tables (`repository`), and frontends decode and encode by them. The LLM
model has vllm_backend's tensors and, so that an ensemble can pass them through, TensorRT-LLM's; the ensemble shows
only the latter. Shapes are without a batch dimension; the ensemble adds one of size 1, but to its text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "STRING"]


class Tensor(msgspec.Struct, frozen=True):
    """One input or output. dims: -1 is any length."""

    name: str
    dtype: DType
    dims: tuple[int, ...] = (1,)
    optional: bool = True


TEXT_INPUT = "text_input"
INPUT_IDS = "input_ids"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
RETURN_LOG_PROBS = "return_log_probs"
DESCRIBE = "describe"  # in place of a prompt: what the model can hold, without a token generated
RESET_PREFIX_CACHE = "reset_prefix_cache"  # in place of a prompt: later requests find nothing of earlier ones

TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
TOKEN_IDS = "token_ids"
NUM_CACHED_TOKENS = "num_cached_tokens"
PROMPT_LOGPROBS = "prompt_logprobs"
ERROR = "error"
RETURN_ERROR = "return_error"
DESCRIPTION = "description"  # JSON: max_model_len (tokens, prompt and answer), marks of its chat template
OUTPUT_LOG_PROBS = "output_log_probs"

MESSAGES = "messages"
TEMPLATE_PARAMETERS = "template_parameters"
ADD_SPECIAL_TOKENS = "add_special_tokens"
SKIP_SPECIAL_TOKENS = "skip_special_tokens"

STOP_WORDS = "stop_words"
NUM_RETURN_SEQUENCES = "num_return_sequences"
SEQUENCE_INDEX = "sequence_index"
BATCH_INDEX = "batch_index"
BEAM_WIDTH = "beam_width"
BIAS_WORDS = "embedding_bias_words"
BIAS_WEIGHTS = "embedding_bias_weights"
END_ID = "end_id"
INPUT_LENGTHS = "input_lengths"
STOP_WORDS_LIST = "stop_words_list"
BAD_WORDS_LIST = "bad_words_list"
EMBEDDING_BIAS = "embedding_bias"
OUTPUT_IDS = "output_ids"
SEQUENCE_LENGTH = "sequence_length"
RETURN_PERF_METRICS = "return_perf_metrics"
GUIDE_TYPE = "guided_decoding_guide_type"
GUIDE = "guided_decoding_guide"

MAX_MODEL_LEN = "max_model_len"  # request parameter of a tokenizer: a chat that can only be longer is not tokenized
TRACE_PARAMETERS = ("traceparent", "tracestate")  # request parameters: the W3C context of the trace it belongs to

# Flags that each let one output through: vllm_backend's five, and three of our own.
RETURN_FLAGS = {
    "return_finish_reason": FINISH_REASON,
    "return_cumulative_logprob": CUMULATIVE_LOGPROB,
    "return_logprobs": LOGPROBS,
    "return_num_input_tokens": NUM_INPUT_TOKENS,
    "return_num_output_tokens": NUM_OUTPUT_TOKENS,
    "return_num_cached_tokens": NUM_CACHED_TOKENS,
    "return_prompt_logprobs": PROMPT_LOGPROBS,
    RETURN_ERROR: ERROR,  # a failure is then a last response {code, message}: streamed gRPC errors have no code
}
_NOT_IN_ENSEMBLE = ("return_cumulative_logprob", "return_logprobs", "return_prompt_logprobs", RETURN_ERROR)

# TensorRT-LLM tensors that are sampling parameters under another roof: tensor -> field of SamplingParams.
SAMPLING_TENSORS = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "min_length": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    STOP_WORDS: "stop",
    "bad_words": "bad_words",
    NUM_RETURN_SEQUENCES: "n",
    GUIDE_TYPE: "guided_decoding_guide_type",
    GUIDE: "guided_decoding_guide",
    BEAM_WIDTH: "beam_width",
    "length_penalty": "length_penalty",
}

# TensorRT-LLM tensors with one value that changes nothing: any other is refused with the sentence.
NEUTRAL_TENSORS: dict[str, tuple[float | bool, str]] = {
    "return_context_logits": (False, "return_context_logits is not implemented: logits never leave the engine"),
    "return_generation_logits": (False, "return_generation_logits is not implemented: use return_log_probs"),
    "stop_request": (False, "a request that stops another is not implemented: cancel the call of the other"),
}

_TRTLLM_SAMPLING = (
    Tensor("max_tokens", "INT32"),
    Tensor(STOP_WORDS, "STRING", (-1,)),
    Tensor("bad_words", "STRING", (-1,)),
    Tensor(END_ID, "INT32"),
    Tensor("pad_id", "INT32"),  # says nothing to an engine without padding
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("temperature", "FP32"),
    Tensor("length_penalty", "FP32"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("min_tokens", "INT32"),
    Tensor("min_length", "INT32"),
    Tensor("seed", "UINT64"),
    Tensor(BEAM_WIDTH, "INT32"),
    Tensor(NUM_RETURN_SEQUENCES, "INT32"),
    Tensor(GUIDE_TYPE, "STRING"),
    Tensor(GUIDE, "STRING"),
    Tensor(BIAS_WORDS, "STRING", (-1,)),
    Tensor(BIAS_WEIGHTS, "FP32", (-1,)),
    Tensor(RETURN_LOG_PROBS, "BOOL"),
    Tensor("return_context_logits", "BOOL"),
    Tensor("return_generation_logits", "BOOL"),
    Tensor(RETURN_PERF_METRICS, "BOOL"),
)

# What TensorRT-LLM's `tensorrt_llm`, which knows no text, takes besides.
_TRTLLM_IDS = (
    Tensor(INPUT_LENGTHS, "INT32"),
    Tensor(STOP_WORDS_LIST, "INT32", (2, -1)),
    Tensor(BAD_WORDS_LIST, "INT32", (2, -1)),
    Tensor(EMBEDDING_BIAS, "FP32", (-1,)),
    Tensor("stop_request", "BOOL"),  # its `stop`; here HTTP's generate would take vLLM's sampling field for it
)

# Outputs of flags in NEUTRAL_TENSORS. Clients name them together with the flag: without them here, the server would
# say that it does not know the output, in place of the sentence.
REFUSED_OUTPUTS = (
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
)

# Outputs of `return_perf_metrics`: blocks of the cache that were allocated for a request, those that it found in the
# prefix cache, and both; moments in nanoseconds of the machine's monotonic clock; what became of its drafts.
PERF_OUTPUTS = (
    *(Tensor(f"kv_cache_{name}_blocks", "INT32") for name in ("alloc_new", "reused", "alloc_total")),
    *(Tensor(f"{name}_time_ns", "INT64") for name in ("arrival", "first_scheduled", "first_token", "last_token")),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
)

LLM_INPUTS = (
    Tensor(TEXT_INPUT, "STRING"),
    Tensor(INPUT_IDS, "INT32", (-1,)),
    Tensor(STREAM, "BOOL"),
    Tensor(SAMPLING_PARAMETERS, "STRING"),
    Tensor(EXCLUDE_INPUT, "BOOL"),
    *(Tensor(flag, "BOOL") for flag in RETURN_FLAGS),
    Tensor(DESCRIBE, "BOOL"),
    Tensor(RESET_PREFIX_CACHE, "BOOL"),
    *_TRTLLM_SAMPLING,
    *_TRTLLM_IDS,
)

LLM_OUTPUTS = (
    Tensor(TEXT_OUTPUT, "STRING", (-1,)),
    Tensor(FINISH_REASON, "STRING", (-1,)),
    Tensor(CUMULATIVE_LOGPROB, "FP32", (-1,)),
    Tensor(LOGPROBS, "STRING", (-1,)),
    Tensor(NUM_INPUT_TOKENS, "UINT32", (1,)),
    Tensor(NUM_OUTPUT_TOKENS, "UINT32", (-1,)),
    Tensor(TOKEN_IDS, "INT32", (-1,)),
    Tensor(OUTPUT_LOG_PROBS, "FP32", (-1, -1)),
    Tensor(NUM_CACHED_TOKENS, "UINT32", (1,)),
    Tensor(PROMPT_LOGPROBS, "STRING", (1,)),
    Tensor(ERROR, "STRING", (1,)),
    Tensor(DESCRIPTION, "STRING", (1,)),
    Tensor(SEQUENCE_INDEX, "INT32", (1,)),  # which answer of `num_return_sequences` a response belongs to
    Tensor(BATCH_INDEX, "INT32"),  # 0: which prompt of a request, which holds one
    *REFUSED_OUTPUTS,
    *PERF_OUTPUTS,
    Tensor(
        OUTPUT_IDS, "INT32", (-1, -1)
    ),  # `token_ids`, a line an answer, behind the prompt's where it is not excluded
    Tensor(SEQUENCE_LENGTH, "INT32", (-1,)),  # of each of these lines, which are filled up with 0
)

TOKENIZER_INPUTS = (
    Tensor(TEXT_INPUT, "STRING"),
    Tensor(MESSAGES, "STRING"),
    Tensor(TEMPLATE_PARAMETERS, "STRING"),
    Tensor(ADD_SPECIAL_TOKENS, "BOOL"),
    Tensor(TOKEN_IDS, "INT32", (-1,)),
    Tensor(SKIP_SPECIAL_TOKENS, "BOOL"),
)

TOKENIZER_OUTPUTS = (
    Tensor(INPUT_IDS, "INT32", (-1,)),
    Tensor(TEXT_OUTPUT, "STRING", (1,)),
)

# What the ensemble hands to the LLM under the same name, besides the tokenizer's ids.
ENSEMBLE_PASSED = (
    *_TRTLLM_SAMPLING,
    Tensor(STREAM, "BOOL"),
    Tensor(EXCLUDE_INPUT, "BOOL"),
    *(Tensor(flag, "BOOL") for flag in RETURN_FLAGS if flag not in _NOT_IN_ENSEMBLE),
)

ENSEMBLE_INPUTS = (Tensor(TEXT_INPUT, "STRING", optional=False), *ENSEMBLE_PASSED)

# Ensemble output -> the LLM's output that it is.
ENSEMBLE_OUTPUT_MAP = {
    TEXT_OUTPUT: TEXT_OUTPUT,
    "cum_log_probs": CUMULATIVE_LOGPROB,
    OUTPUT_LOG_PROBS: OUTPUT_LOG_PROBS,
    FINISH_REASON: FINISH_REASON,
    NUM_INPUT_TOKENS: NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS: NUM_OUTPUT_TOKENS,
    TOKEN_IDS: TOKEN_IDS,
    NUM_CACHED_TOKENS: NUM_CACHED_TOKENS,
    SEQUENCE_INDEX: SEQUENCE_INDEX,
    BATCH_INDEX: BATCH_INDEX,
    **{tensor.name: tensor.name for tensor in (*REFUSED_OUTPUTS, *PERF_OUTPUTS)},
}

_LLM_OUTPUT = {t.name: t for t in LLM_OUTPUTS}
# The ensemble's outputs over a model that takes batches.
BATCHED_OUTPUTS = tuple(
    Tensor(name, _LLM_OUTPUT[source].dtype, _LLM_OUTPUT[source].dims) for name, source in ENSEMBLE_OUTPUT_MAP.items()
)
# TensorRT-LLM's postprocessing sends the texts as a vector, one a request of the batch, and its clients read
# `output[0].decode()`. An ensemble puts a batch dimension before what a model without batches sends where the dims here
# match it, so these do not match [1]: the vector goes out as it came.
ENSEMBLE_OUTPUTS = tuple(
    Tensor(TEXT_OUTPUT, "STRING", (2,)) if tensor.name == TEXT_OUTPUT else tensor for tensor in BATCHED_OUTPUTS
)

# Wire sentences that clients of vllm_backend look for.
STREAM_ECHO_REFUSAL = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
LORA_REFUSAL = "LoRA feature is not enabled."
ERROR_TEXT = "N/A"  # text_output of an error response
NOT_FINISHED = "None"  # finish_reason of a response that is not the last
