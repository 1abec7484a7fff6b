"""TensorRT-LLM's stages: texts to ids and words to lists of ids, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.demo.make import make
from engine.serving.frontend import tensorrt_llm, word_lists
from engine.serving.frontend.request_tensors import LlmRequest, llm_request
from engine.serving.link import protocol
from engine.text import Tokenizer
from engine.types import RequestError

WORDS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), max_size=16)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("checkpoint")
    make(folder)
    return Tokenizer.from_folder(folder)


@given(st.lists(WORDS, min_size=1, max_size=3))
def test_words_come_back_as_they_were(lists: list[list[list[int]]]) -> None:
    array = word_lists.packed(lists)
    assert array.shape[:2] == (len(lists), 2)
    for row, words in zip(array, lists, strict=True):
        assert word_lists.unpacked("w", row) == tuple(map(tuple, words))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[1, 2], [2, 1]], "rising ends"),
        ([[1, 2], [-1, 2]], "rising ends"),
        ([[1, 2], [0, -1]], "rising ends"),
        ([[1, 2], [-5, 2]], "rising ends"),
        ([[1, 2], [3, -1]], "ends at 3, but there are 2"),
        ([list(range(65)), list(range(1, 66))], "more than 64 words"),
        ([[0] * 1025, [1025, *[-1] * 1024]], "or 1024 tokens"),
    ],
)
def test_a_list_that_is_none_is_refused(rows: list[list[int]], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        word_lists.unpacked("w", np.array(rows, np.int32))


@given(st.integers(0, 5).flatmap(lambda n: st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2 * n, max_size=2 * n)))
def test_any_list_is_read_or_refused(values: list[int]) -> None:
    try:
        words = word_lists.unpacked("w", np.array(values, np.int32).reshape(2, -1))
    except RequestError:
        return
    assert sum(map(len, words)) <= len(values) // 2


def strings(*rows: list[str]) -> Any:
    return np.array([[text.encode() for text in row] for row in rows], np.object_)


def test_a_batch_of_prompts_and_its_words(tokenizer: Tokenizer) -> None:
    tensors = {
        "QUERY": strings(["a server"], ["the queue module implements"]),
        "REQUEST_OUTPUT_LEN": np.array([[3], [4]], np.int32),
        "STOP_WORDS_DICT": strings(["answer", ""], ["queue", "the"]),
        "EMBEDDING_BIAS_WORDS": strings(["queue"], [""]),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[2.0], [1.0]], np.float32),
        "PAD_ID": np.array([[7], [7]], np.int32),
    }
    found = tensorrt_llm.preprocess(tensors, tokenizer, 5)
    prompts = [tokenizer.encode("a server"), tokenizer.encode("the queue module implements")]
    assert found["REQUEST_INPUT_LEN"].tolist() == [[len(ids)] for ids in prompts]
    assert found["INPUT_ID"][0].tolist() == prompts[0] + [7] * (len(prompts[1]) - len(prompts[0]))
    assert found["INPUT_ID"][1].tolist() == prompts[1]
    words = [word_lists.unpacked("w", row) for row in found["STOP_WORDS_IDS"]]
    assert [[tokenizer.decode(word) for word in some] for some in words] == [["answer"], ["queue", "the"]]
    assert found["BAD_WORDS_IDS"].shape == (2, 2, 0)
    assert set(np.flatnonzero(found["EMBEDDING_BIAS"][0])) == set(tokenizer.encode("queue", add_special_tokens=False))
    assert not found["EMBEDDING_BIAS"][1].any()
    assert (found["OUT_END_ID"].tolist(), found["OUT_PAD_ID"].tolist()) == ([[5], [5]], [[7], [7]])
    assert set(found) == {tensor.name for tensor in tensorrt_llm.PREPROCESSING_OUTPUTS}
    with pytest.raises(RequestError, match="models with an encoder"):
        tensorrt_llm.preprocess({**tensors, "DECODER_QUERY": strings(["a"], ["b"])}, tokenizer, 5)
    with pytest.raises(RequestError, match="one weight a word"):
        tensorrt_llm.preprocess({k: v for k, v in tensors.items() if k != "EMBEDDING_BIAS_WEIGHTS"}, tokenizer, 5)


def test_sequences_become_texts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a server takes")
    batch = np.array([[[*ids, 1, 1]], [[*ids, 1, 1]]], np.int32)
    lengths = np.array([[len(ids)], [0]], np.int32)
    found = tensorrt_llm.postprocess({"TOKENS_BATCH": batch, "SEQUENCE_LENGTH": lengths}, tokenizer)
    assert found.tolist() == [b"a server takes", b""]
    with pytest.raises(RequestError, match="must lie between 0 and"):
        tensorrt_llm.postprocess({"TOKENS_BATCH": batch, "SEQUENCE_LENGTH": lengths + 9}, tokenizer)
    with pytest.raises(RequestError, match="SEQUENCE_LENGTH"):
        tensorrt_llm.postprocess({"TOKENS_BATCH": batch, "SEQUENCE_LENGTH": lengths[:1]}, tokenizer)


def decoded(**tensors: Any) -> LlmRequest:
    base = {protocol.INPUT_IDS: np.array([1, 2, 3], np.int32), protocol.INPUT_LENGTHS: np.array([2], np.int32)}
    return llm_request({**base, **tensors}, {}, frozenset({protocol.OUTPUT_IDS}))


def test_what_the_llm_takes_as_ids() -> None:
    bias = np.zeros(9, np.float32)
    bias[4] = 2.5
    words = word_lists.packed([[[3], [4, 5]]])[0]
    asked = decoded(stop_words_list=words, bad_words_list=words, embedding_bias=bias)
    assert list(asked.input_ids or ()) == [1, 2]
    assert asked.stop_ids == asked.bad_ids == ((3,), (4, 5))
    assert asked.params.logit_bias == {4: 2.5}
    assert asked.wanted.output_ids
    for length in (0, 4, -1):
        with pytest.raises(RequestError, match="input_ids holds 3 tokens"):
            decoded(input_lengths=np.array([length], np.int32))
    with pytest.raises(RequestError, match="2000 values that are not 0"):
        decoded(embedding_bias=np.ones(2000, np.float32))
    with pytest.raises(RequestError, match="embedding_bias and logit_bias: 1025 tokens together"):
        decoded(
            embedding_bias=np.ones(1024, np.float32),
            sampling_parameters=np.array([b'{"logit_bias": {"2000": 1.0}}'], object),
        )
    with pytest.raises(RequestError, match="must lie between"):
        decoded(embedding_bias=np.full(3, np.nan, np.float32))
    with pytest.raises(RequestError, match="stops another is not implemented"):
        decoded(stop_request=np.array([True]))


def test_names_types_and_shapes_are_tensorrt_llms() -> None:
    """reference: NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt."""
    inputs = {t.name: (t.dtype, t.dims, t.optional) for t in tensorrt_llm.INPUTS}
    for name in ("input_lengths", "request_output_len"):
        assert inputs[name] == ("INT32", (1,), False)
    for name in ("runtime_top_k", "beam_width", "end_id", "pad_id", "num_return_sequences", "min_tokens"):
        assert inputs[name] == ("INT32", (1,), True)
    for name in ("runtime_top_p", "temperature", "len_penalty", "repetition_penalty"):
        assert inputs[name] == ("FP32", (1,), True)
    assert inputs["stop_words_list"] == inputs["bad_words_list"] == ("INT32", (2, -1), True)
    assert (inputs["streaming"], inputs["seed"][0]) == (("BOOL", (1,), True), "UINT64")
    outputs = {t.name: (t.dtype, t.dims) for t in tensorrt_llm.OUTPUTS}
    assert outputs["output_ids"] == ("INT32", (-1, -1))
    assert outputs["sequence_length"] == ("INT32", (-1,))
    assert outputs["cum_log_probs"] == ("FP32", (-1,))
