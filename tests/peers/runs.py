"""What `make test-peers` runs, and why some of it cannot pass here."""

from __future__ import annotations

_CI = "ci/L0_backend_vllm"

# Not accuracy_test.py: it imports vllm, to compare with it.
TEST_FILES = (
    "ci/L0_additional_outputs_vllm/additional_outputs_test.py",
    f"{_CI}/enabled_stream/enabled_stream_test.py",
    f"{_CI}/vllm_backend/vllm_backend_test.py",
    f"{_CI}/request_cancellation/request_cancellation_test.py",
    f"{_CI}/metrics_test/vllm_metrics_test.py",
    "ci/L0_check_health_vllm/check_health_test.py",
)

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
    "test_vllm_metrics_disabled": "wants a server without metrics",
    "test_vllm_metrics_refused": "wants a server without metrics",
    "test_vllm_metrics": "compares with the token counts of opt-125m",
    "test_request_cancellation": "reads words of vLLM's in its log",
    "test_vllm_not_healthy": "needs a vLLM that was changed to say that it is not well",
    "client --return-context-logits": "logits never leave the engine: refused",
    "client --return-generation-logits": "logits never leave the engine: refused",
    "client --return-perf-metrics": "not built: the metrics endpoint has such figures",
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
