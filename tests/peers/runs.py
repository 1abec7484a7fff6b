"""What `make test-peers` runs, and why some of it cannot pass here."""

from __future__ import annotations

import msgspec


class TestFile(msgspec.Struct, frozen=True):
    """A file of vllm_backend's tests. tests: those that are run, as their test.sh names them; empty is all of them.
    log: what it reads the server's log by."""

    name: str
    tests: tuple[str, ...] = ()
    log: str = ""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A server that files are run against, as their test.sh starts it. parameters: of the model's config.pbtxt.
    flags: of `nereid serve`. ends: the model's engine ends at its second request, for good."""

    files: tuple[TestFile, ...]
    parameters: dict[str, str] = {}
    flags: tuple[str, ...] = ()
    ends: bool = False


_CI = "ci/L0_backend_vllm"
_METRICS = f"{_CI}/metrics_test/vllm_metrics_test.py"
_HEALTH = "ci/L0_check_health_vllm/check_health_test.py"


def _metrics(test: str) -> tuple[TestFile, ...]:
    return (TestFile(_METRICS, (f"VLLMTritonMetricsTest.{test}",)),)


# Not accuracy_test.py: it imports vllm, to compare with it.
SETUPS = (
    Setup(
        files=(
            TestFile("ci/L0_additional_outputs_vllm/additional_outputs_test.py"),
            TestFile(f"{_CI}/enabled_stream/enabled_stream_test.py"),
            TestFile(f"{_CI}/vllm_backend/vllm_backend_test.py"),
            TestFile(_HEALTH, ("TestCheckHealth::test_vllm_is_healthy",)),
        )
    ),
    Setup(
        files=(
            TestFile(f"{_CI}/request_cancellation/request_cancellation_test.py", log="request_cancellation_server.log"),
        ),
        flags=("--log-verbose", "1"),
    ),
    Setup(files=_metrics("test_vllm_metrics_disabled"), parameters={"REPORT_CUSTOM_METRICS": "false"}),
    Setup(files=_metrics("test_vllm_metrics"), parameters={"REPORT_CUSTOM_METRICS": "true"}),
    Setup(files=_metrics("test_custom_sampling_params"), parameters={"REPORT_CUSTOM_METRICS": "true"}),
    Setup(
        files=_metrics("test_vllm_metrics_refused"),
        parameters={"REPORT_CUSTOM_METRICS": "true"},
        flags=("--metrics-port", "0"),
    ),
    Setup(
        files=(TestFile(_HEALTH, ("TestCheckHealth::test_vllm_not_healthy",)),),
        parameters={"ENABLE_VLLM_HEALTH_CHECK": "true", "restart_limit": "0"},
        ends=True,
    ),
)

# Python reads it in each process that it starts. Their test.sh changes vLLM's files, so that it says from the second
# time on that it is not well.
ENDS_AT_THE_SECOND_REQUEST = """import os
import sys

if "engine.serving.host" in sys.orig_argv:
    from engine.api import Engine

    submit, taken = Engine.submit, []

    def submit_one(self, input, sink):
        taken.append(input)
        if len(taken) > 1:
            os._exit(1)
        submit(self, input, sink)

    Engine.submit = submit_one
"""

_STREAM_REFUSAL = "When streaming, `exclude_input_in_output` = False is not allowed."
# (flags of samples/client.py, the refusal that vllm_backend answers with)
SAMPLE_RUNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), ""),
    (("--exclude-inputs-in-outputs",), ""),
    (("-s", "--exclude-inputs-in-outputs"), ""),
    (("--iterations", "2"), ""),
    (("-s",), _STREAM_REFUSAL),
)

_ONE = "A server takes a question and"
_TWO = '["A server takes a question and", "The queue module implements"]'
# (prompts, flags of end_to_end_grpc_client.py)
CLIENT_RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_ONE, ()),
    (_ONE, ("-S",)),
    (_ONE, ("-S", "--overwrite-output-text")),
    (_ONE, ("--exclude-input-in-output",)),
    (_ONE, ("-S", "--exclude-input-in-output")),
    (_ONE, ("--temperature", "0.5")),
    (_ONE, ("--repetition-penalty", "1.2")),
    (_ONE, ("--presence-penalty", "0.5")),
    (_ONE, ("--frequency-penalty", "0.5")),
    (_ONE, ("--stop-words", "answer", "the")),
    (_ONE, ("--bad-words", "answer", "the")),
    (_ONE, ("--end-id", "2", "--pad-id", "2")),
    (_ONE, ("--request-id", "7")),
    (_ONE, ("--return-log-probs",)),
    (_ONE, ("-S", "--return-log-probs")),
    (_ONE, ("-n", "2")),
    (_ONE, ("-S", "-n", "2")),
    (_TWO, ()),
    (_TWO, ("-S",)),
    (_TWO, ("--batch-inputs",)),
    (_ONE, ("--embedding-bias-words", "answer", "--embedding-bias-weights", "2.0")),
    (_ONE, ("--return-context-logits",)),
    (_ONE, ("--return-generation-logits",)),
    (_ONE, ("--return-perf-metrics",)),
    (_ONE, ("-b", "2")),
    (_ONE, ("--guided-decoding-guide-type", "json")),
    (_ONE, ("--model-name", "tensorrt_llm_bls")),
)

_WORDS = "compares with the words of opt-125m"
# Part of a test's or a run's name -> why it cannot pass.
THEIRS = {
    "test_vllm_model_enabled_stream_exclude_input_in_output_default": _WORDS,
    "test_vllm_model_enabled_stream_exclude_input_in_output_true": _WORDS,
    "test_exclude_input_in_output": _WORDS,
    "test_vllm_metrics": "wants opt-125m's token counts, at once; counters are written each half second here",
    "client --return-context-logits": "logits never leave the engine: refused",
    "client --return-generation-logits": "logits never leave the engine: refused",
}

ADD_SUB_CONFIG = """name: "add_sub"
backend: "python"
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
instance_group [ { kind: KIND_CPU } ]
"""

ADD_SUB_MODEL = '''"""Sum and difference: a second model beside the LLM."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(*(tensor.as_numpy() for tensor in request.inputs())) for request in requests]

    def _answer(self, left, right):
        tensors = [pb.Tensor("OUTPUT0", left + right), pb.Tensor("OUTPUT1", left - right)]
        return pb.InferenceResponse(output_tensors=tensors)
'''

# Of NVIDIA's tests of its OpenAI frontend. Not test_lora.py: it calls functions of that frontend, and its adapters are
# refused here.
FRONTEND_FILES = (
    "test_completions.py",
    "test_chat_completions.py",
    "test_openai_client.py",
    "test_tool_calling.py",
    "test_embeddings.py",
    "test_model_management.py",
    "test_observability.py",
    "test_openai_restricted_apis.py",
    "test_request_size.py",
)
# They call classes of that frontend, no server.
FRONTEND_NOT_RUN = (
    "TestContentLengthValidation",
    "test_restricted_feature_summary",
    "test_startup_log_does_not_leak",
)

_BAD_REQUEST = "400 with OpenAI's error object, as OpenAI; 422 and FastAPI's `detail` there"
_DETAIL = "the sentence stands in `error.message`, as OpenAI's; in `detail` there"
_SERVED = "served here, refused there"
_NOT_LOADED = "404 with OpenAI's error object for a model that is not loaded, as OpenAI; 400 and `detail` there"
_NO_SUCH_ENTRY = "404 for a name that the repository does not have; 500 and 400 there"
_COMMAND = "flags of its own command, which starts the server; `nereid serve` does here"
_DEMO = "the demo model's words"
# (pattern in file::class::test, why it cannot pass); the first that is found counts.
FRONTEND_THEIRS = (
    (r"invalid_sampling_parameters|empty_request|test_completions_no_|test_no_prompt", _BAD_REQUEST),
    (r"completions_no_message|completions_empty_message|top_logprobs_(validation|exceeds_max)", _BAD_REQUEST),
    (r"top_logprobs_without_logprobs|rejects_duplicate", _DETAIL),
    (r"streaming_usage_option", "compares numbers of chunks: on a busy machine some hold several tokens"),
    (r"sampling_parameters\[logit_bias|multiple_choices|logprobs_(validation|exceeds_max)", _SERVED),
    (r"test_completions_logprobs_zero", "0 asks for each token's own log-probability, as with OpenAI; for none there"),
    (r"OpenAIClient::test_openai_client_completion$", "a cut answer ends with `length`; always with `stop` there"),
    (r"TestChatCompletionsTokenizers", "its frontend is told a tokenizer; a model has its own here"),
    (r"test_tool_call_", "the demo model calls no tool of itself, and fills in nonsense"),
    (r"TestStreamingToolParseLimit", "asks for more tokens than the demo model's context holds"),
    (r"TestEmbeddings", "embeddings: refused with 404"),
    (r"test_startup_metrics", "the server's own metrics stand on its port, 8002"),
    (r"TestModelControlCLIOptions", _COMMAND),
    (r"test_load_and_unload_rejected", "loads and unloads are always possible, with the admin key"),
    (r"load_unload_unknown_model", _NO_SUCH_ENTRY),
    (r"TestModelManagementInference", _NOT_LOADED),
    (r"body_over_limit", "compares with the sentence of its own class"),
    (r"test_completions_(defaults|sampling_parameters|max_tokens|temperature_vllm|seed)", _DEMO),
    (r"test_completions::.*test_usage_response|OpenAIClient::test_completion_logprobs$", _DEMO),
)
