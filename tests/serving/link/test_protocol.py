"""The checked-in model repository is what the wire tables write."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from engine.serving.launch import repository
from engine.serving.link import protocol
from engine.types import SamplingParams

MODELS = Path(__file__).parents[3] / "model_repository"
DOCUMENT = MODELS.parent / "docs" / "triton.md"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("demo", repository.llm_config("demo", {"model": "checkpoint"})),
        ("tokenizer", repository.tokenizer_config("tokenizer", {"model": "../demo/checkpoint"})),
        ("ensemble", repository.ensemble_config("ensemble", "tokenizer", "demo")),
    ],
)
def test_checked_in_config_is_written_from_the_tables(name: str, written: str) -> None:
    assert (MODELS / name / "config.pbtxt").read_text() == written


def test_vllm_backends_tensors_are_all_there() -> None:
    """reference: vllm_backend/src/model.py, _auto_complete_inputs_and_outputs; images and embeddings are not served."""
    inputs = {t.name: (t.dtype, t.dims) for t in protocol.LLM_INPUTS}
    for name in ("text_input", "sampling_parameters"):
        assert inputs[name] == ("STRING", (1,))
    flags = ["stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob"]
    flags += ["return_logprobs", "return_num_input_tokens", "return_num_output_tokens"]
    assert all(inputs[name] == ("BOOL", (1,)) for name in flags)
    outputs = {t.name: (t.dtype, t.dims) for t in protocol.LLM_OUTPUTS}
    assert outputs["text_output"] == outputs["finish_reason"] == outputs["logprobs"] == ("STRING", (-1,))
    assert outputs["cumulative_logprob"] == ("FP32", (-1,))
    assert outputs["num_input_tokens"] == ("UINT32", (1,))
    assert outputs["num_output_tokens"] == ("UINT32", (-1,))


def test_every_tensor_of_the_llm_is_read_somewhere() -> None:
    """No input is declared and then ignored: each is a prompt, a flag, a sampling field or has one neutral value.
    pad_id alone says nothing to an engine without padding."""
    read = {
        protocol.TEXT_INPUT,
        protocol.INPUT_IDS,
        protocol.STREAM,
        protocol.SAMPLING_PARAMETERS,
        protocol.EXCLUDE_INPUT,
        protocol.RETURN_LOG_PROBS,
        protocol.END_ID,
        protocol.DESCRIBE,
        protocol.RESET_PREFIX_CACHE,
        protocol.BIAS_WORDS,
        protocol.BIAS_WEIGHTS,
        protocol.INPUT_LENGTHS,
        protocol.STOP_WORDS_LIST,
        protocol.BAD_WORDS_LIST,
        protocol.EMBEDDING_BIAS,
        protocol.RETURN_PERF_METRICS,
        *protocol.RETURN_FLAGS,
        *protocol.SAMPLING_TENSORS,
        *protocol.NEUTRAL_TENSORS,
    }
    assert {t.name for t in protocol.LLM_INPUTS} - read == {"pad_id"}


def test_the_page_on_requests_names_every_tensor_and_sampling_field() -> None:
    named = set(re.findall(r"`([a-z_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    tables = (protocol.LLM_INPUTS, protocol.LLM_OUTPUTS, protocol.TOKENIZER_INPUTS, protocol.TOKENIZER_OUTPUTS)
    tensors = {tensor.name for table in (*tables, protocol.ENSEMBLE_OUTPUTS) for tensor in table}
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert tensors | fields <= named


def test_ensemble_hands_on_what_it_takes() -> None:
    llm = {t.name: t for t in protocol.LLM_INPUTS}
    for tensor in protocol.ENSEMBLE_PASSED:
        assert llm[tensor.name] == tensor
    assert {t.name for t in protocol.ENSEMBLE_INPUTS} - {t.name for t in protocol.ENSEMBLE_PASSED} == {"text_input"}
