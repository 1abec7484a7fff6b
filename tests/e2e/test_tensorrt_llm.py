"""Entries with TensorRT-LLM's names, called as its own clients call them: 2-D tensors, `[0][0]` of what comes back."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import np_to_triton_dtype

from engine.serving.launch import repository
from engine.serving.link import protocol
from tests.e2e.conftest import SETTINGS
from tests.e2e.harness import WAIT_S, Call, Server, text_of, tokens_of, wait_until

PROMPT = "A server takes a question and"
NAMES = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def entries(
    server: Server, models: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The session's server with these entries over its `demo` and `tokenizer`."""
    written = tmp_path_factory.mktemp("written")
    parameters = {"model": str(checkpoint)}
    repository.write_tensorrt_llm(written, "demo", parameters, {**parameters, **SETTINGS})
    for name in NAMES:
        (written / name).rename(models / name)
        assert server.load(name) is None
    yield server
    for name in reversed(NAMES):
        server.unload(name)


@pytest.fixture(scope="module")
def whole(server: Server, models: Path, checkpoint: Path) -> Iterator[Server]:
    """The session's server with a model that is not decoupled, and an ensemble over it."""
    repository.write_llm(models, "whole", {"model": str(checkpoint), **SETTINGS}, 1, decoupled=False)
    repository.write_ensemble(models, "whole_ensemble", "tokenizer", "whole")
    for name in ("whole", "whole_ensemble"):
        assert server.load(name) is None
    yield server
    for name in ("whole_ensemble", "whole"):
        server.unload(name)


def tensor(name: str, values: Any, dtype: Any = np.int32) -> InferInput:
    array = np.array(values, dtype=dtype)
    made = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def streamed(server: Server, model: str, inputs: list[InferInput], outputs: list[str] | None = None) -> list[Any]:
    """The results of one request on a stream."""
    found: queue.Queue[Any] = queue.Queue()
    with InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        named = None if outputs is None else [InferRequestedOutput(name) for name in outputs]
        client.async_stream_infer(model, inputs, outputs=named, enable_empty_final_response=True)
        results = []
        while True:
            result, error = found.get(timeout=WAIT_S)
            if error is not None:
                raise error
            if result.get_response().outputs:
                results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                client.stop_stream()
                return results


def generation(ids: list[int], length: int = 8, **flags: bool) -> list[InferInput]:
    """The tensors of inflight_batcher_llm_client.py."""
    return [
        tensor("input_ids", [ids]),
        tensor("input_lengths", [[len(ids)]]),
        tensor("request_output_len", [[length]]),
        tensor("beam_width", [[1]]),
        tensor("temperature", [[1.0]], np.float32),
        tensor("end_id", [[-1]]),
        tensor("pad_id", [[-1]]),
        tensor("runtime_top_k", [[1]]),
        tensor("runtime_top_p", [[0.0]], np.float32),
        *(tensor(name, [[value]], bool) for name, value in flags.items()),
    ]


def test_the_three_stages_in_turn_give_what_the_ensemble_gives(entries: Server) -> None:
    with InferenceServerClient(entries.grpc) as client:
        query = [tensor("QUERY", [[PROMPT.encode()]], object), tensor("REQUEST_OUTPUT_LEN", [[8]])]
        before = client.infer("preprocessing", query)
        ids = before.as_numpy("INPUT_ID")[0].tolist()
        assert before.as_numpy("REQUEST_INPUT_LEN").tolist() == [[len(ids)]]
        (result,) = streamed(entries, "tensorrt_llm", generation(ids, streaming=False, exclude_input_in_output=True))
        sequences, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        assert (sequences.shape, lengths.tolist()) == ((1, 1, lengths[0][0]), [[8]])
        after = client.infer("postprocessing", [tensor("TOKENS_BATCH", sequences), tensor("SEQUENCE_LENGTH", lengths)])
        call = {"text_input": PROMPT, "max_tokens": 8, "top_k": 1, "exclude_input_in_output": True}
        (whole,) = Call(entries, "ensemble", **call).all()
        assert after.as_numpy("OUTPUT").tolist() == [whole["text_output"][0].encode()]
    (echoed,) = streamed(entries, "tensorrt_llm", generation(ids))
    assert echoed.as_numpy("output_ids")[0][0].tolist() == [*ids, *sequences[0][0].tolist()]
    assert echoed.as_numpy("sequence_length")[0][0] == len(ids) + 8
    parts = streamed(entries, "tensorrt_llm", generation(ids, streaming=True))
    assert len(parts) > 1
    assert [i for part in parts for i in part.as_numpy("output_ids")[0][0].tolist()] == sequences[0][0].tolist()


def test_batches_go_through_the_tokenizers_stages(entries: Server) -> None:
    texts = [PROMPT, "The queue"]
    with InferenceServerClient(entries.grpc) as client:
        query = [tensor("QUERY", [[t.encode()] for t in texts], object), tensor("REQUEST_OUTPUT_LEN", [[8], [8]])]
        before = client.infer("preprocessing", query)
        lengths = before.as_numpy("REQUEST_INPUT_LEN")
        batch = before.as_numpy("INPUT_ID")[:, None]
        after = client.infer("postprocessing", [tensor("TOKENS_BATCH", batch), tensor("SEQUENCE_LENGTH", lengths)])
        assert after.as_numpy("OUTPUT").tolist() == [text.encode() for text in texts]
        with pytest.raises(Exception, match="models with an encoder"):
            client.infer("preprocessing", [*query, tensor("DECODER_QUERY", [[b"a"], [b"b"]], object)])


def test_words_as_ids_stop_and_ban(entries: Server) -> None:
    """STOP_WORDS_IDS and BAD_WORDS_IDS of preprocessing go into tensorrt_llm as they are."""
    prompt = Call(entries, "tokenizer", text_input=PROMPT).all()[0]["input_ids"]
    call = {"text_input": PROMPT, "max_tokens": 16, "top_k": 1}
    text = text_of(Call(entries, **call, stream=True).all())
    word = text.split()[1]
    with InferenceServerClient(entries.grpc) as client:
        query = [tensor("QUERY", [[b"x"]], object), tensor("REQUEST_OUTPUT_LEN", [[8]])]
        words = client.infer("preprocessing", [*query, tensor("STOP_WORDS_DICT", [[word.encode()]], object)])
        bans = client.infer("preprocessing", [*query, tensor("BAD_WORDS_DICT", [[f" {word}".encode()]], object)])
    stop, bad = words.as_numpy("STOP_WORDS_IDS"), bans.as_numpy("BAD_WORDS_IDS")
    inputs = generation(prompt, 16, exclude_input_in_output=True)
    (stopped,) = streamed(entries, "tensorrt_llm", [*inputs, tensor("stop_words_list", stop)])
    wanted = tokens_of(Call(entries, **call, stream=True, stop_words=[word]).all())
    assert stopped.as_numpy("output_ids")[0][0].tolist() == wanted
    assert len(wanted) < 16
    (banned,) = streamed(entries, "tensorrt_llm", [*inputs, tensor("bad_words_list", bad)])
    kept = bad[0][0].tolist()
    ids = banned.as_numpy("output_ids")[0][0].tolist()
    assert not any(ids[i : i + len(kept)] == kept for i in range(len(ids)))
    assert any(tokens_of(Call(entries, **call).all())[i : i + len(kept)] == kept for i in range(16))


def test_bls_answers_as_the_ensemble_does(entries: Server) -> None:
    """end_to_end_grpc_client.py -S --model-name tensorrt_llm_bls, which never excludes the prompt and never gets it."""
    inputs = [tensor("text_input", [[PROMPT.encode()]], object), tensor("max_tokens", [[8]]), tensor("top_k", [[1]])]
    inputs += [tensor("stream", [[True]], bool), tensor("exclude_input_in_output", [[False]], bool)]
    texts = []
    for model in ("tensorrt_llm_bls", "ensemble"):
        parts = streamed(entries, model, inputs, ["text_output"])
        texts.append("".join(part.as_numpy("text_output")[0].decode() for part in parts))
    assert texts[0] == texts[1] != ""
    assert len(entries.engine_pids("demo")) == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("stop", [[True]], bool), "stops another is not implemented"),
        (("len_penalty", [[0.5]], np.float32), "length_penalty belongs to beam search"),
        (("return_context_logits", [[True]], bool), "return_context_logits is not implemented"),
        (("stop_words_list", [[[1, 2], [2, 1]]], np.int32), "rising ends"),
        (("bad_words_list", [[[99999999], [1]]], np.int32), "holds the token id 99999999"),
    ],
)
def test_tensorrt_llm_refuses_with_a_sentence(entries: Server, more: Any, sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        streamed(entries, "tensorrt_llm", [*generation([1, 2]), tensor(*more)])


PERF = [tensor.name for tensor in protocol.PERF_OUTPUTS]
MOMENTS = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_perf_metrics_come_with_every_response(entries: Server, model: str, stream: bool) -> None:
    """end_to_end_grpc_client.py --return-perf-metrics names ten outputs together with the flag, and reads [0][0]."""
    ids = model == "tensorrt_llm"
    text = "output_ids" if ids else "text_output"
    assert len(PERF) == 10
    flag = tensor("return_perf_metrics", [[True]], bool)
    streaming = tensor("streaming" if ids else "stream", [[stream]], bool)
    prompt = list(range(3, 103))
    before = time.monotonic_ns()
    for turn in range(2):
        inputs = generation(prompt) if ids else batch("The queue. " * 30, max_tokens=[9], temperature=[0.0], seed=[3])
        results = streamed(entries, model, [*inputs, streaming, flag], [text, *PERF])
        assert len(results) > 1 or not stream
        for result in results:
            found = {name: result.as_numpy(name)[0][0] for name in PERF}
            moments = [found[name] for name in MOMENTS]
            assert moments == sorted(moments)
            assert before < moments[0] < moments[-1] < time.monotonic_ns()
            assert found["kv_cache_alloc_total_blocks"] > 1
            new, reused = found["kv_cache_alloc_new_blocks"], found["kv_cache_reused_blocks"]
            assert new + reused == found["kv_cache_alloc_total_blocks"]
            assert new > 0
            assert reused > 0 or turn == 0
            drafts = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
            assert [found[name] for name in drafts] == [0, 0, 0]


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_outputs_that_no_flag_asks_for_stay_away(entries: Server, model: str) -> None:
    inputs = generation([1, 2]) if model == "tensorrt_llm" else prompt_of(2)
    text = "output_ids" if model == "tensorrt_llm" else "text_output"
    (result,) = streamed(entries, model, inputs, [text, *PERF])
    assert [output.name for output in result.get_response().outputs] == [text]


def batch(*texts: str, **columns: Any) -> list[InferInput]:
    """What end_to_end_grpc_client.py --batch-inputs sends: a line a prompt in every tensor."""
    made = [tensor("text_input", [[text.encode()] for text in texts], object)]
    kinds = {"stream": bool, "temperature": np.float32, "seed": np.uint64}
    return [
        *made,
        *(tensor(name, [[v] for v in values], kinds.get(name, np.int32)) for name, values in columns.items()),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_gives_each_prompt_what_it_gets_alone(entries: Server, stream: bool) -> None:
    texts, lengths = (PROMPT, "The", f"{PROMPT} then it"), (9, 3, 6)
    alone = [
        text_of(Call(entries, text_input=text, max_tokens=most, top_k=1, stream=True).all())
        for text, most in zip(texts, lengths, strict=True)
    ]
    inputs = batch(*texts, max_tokens=lengths, top_k=(1, 1, 1), stream=(stream,) * 3, temperature=(1.0,) * 3)
    results = streamed(entries, "tensorrt_llm_bls", inputs, ["text_output", "batch_index"])
    found = [""] * 3
    for result in results:
        found[result.as_numpy("batch_index")[0][0]] += result.as_numpy("text_output")[0].decode()
    if stream:
        assert len(results) > 3
    else:
        assert len(results) == 3
        found = [text.removeprefix(prompt) for text, prompt in zip(found, texts, strict=True)]
    assert found == alone
    assert len(entries.engine_pids("demo")) == 1, "frontends of both names share it"


def test_a_batch_has_beams_and_several_answers_a_prompt(entries: Server) -> None:
    inputs = batch(PROMPT, "The", max_tokens=(4, 4), beam_width=(2, 2))
    results = streamed(entries, "tensorrt_llm_bls", inputs, ["text_output", "batch_index"])
    assert [len(r.as_numpy("text_output")) for r in results] == [2, 2]
    inputs = batch(PROMPT, "The", max_tokens=(4, 4), num_return_sequences=(2, 3), seed=(1, 1))
    results = streamed(entries, "tensorrt_llm_bls", inputs, ["text_output", "batch_index", "sequence_index"])
    told = sorted((r.as_numpy("batch_index")[0][0], r.as_numpy("sequence_index")[0][0]) for r in results)
    assert told == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_wrong_prompt_refuses_its_batch_and_nobody_else(entries: Server) -> None:
    with pytest.raises(Exception, match="temperature"):
        streamed(entries, "tensorrt_llm_bls", batch("a", "b", max_tokens=(2, 2), temperature=(1.0, -3.0)))
    with pytest.raises(Exception, match="200 answers together; at most 128 are allowed"):
        streamed(entries, "tensorrt_llm_bls", batch("a", "b", max_tokens=(2, 2), num_return_sequences=(100, 100)))
    with pytest.raises(Exception, match="batch-size must be <= 64"):
        streamed(entries, "tensorrt_llm_bls", batch(*["a"] * 65, max_tokens=(2,) * 65))
    assert len(streamed(entries, "tensorrt_llm_bls", batch("a", max_tokens=(2,)))) == 1


def test_a_batch_whose_client_goes_away_frees_blocks(entries: Server) -> None:
    used = "vllm:kv_cache_blocks_used"
    with InferenceServerClient(entries.grpc) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("tensorrt_llm_bls", batch("a", "b", max_tokens=(1000, 1000), end_id=(-1, -1)))
        wait_until(lambda: entries.metric(used, model="demo") > 0, "the batch holds blocks")
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: entries.metric(used, model="demo") == 0, "its blocks are free", 20.0)


def prompt_of(length: int, *more: InferInput) -> list[InferInput]:
    return [
        tensor("text_input", [[PROMPT.encode()]], object),
        tensor("max_tokens", [[length]]),
        tensor("top_k", [[1]]),
        *more,
    ]


def test_a_model_that_is_not_decoupled_takes_unary_calls(whole: Server) -> None:
    """As clients call TensorRT-LLM's models where `decoupled_mode` is false: gRPC's `infer`, HTTP's /infer."""
    (wanted,) = Call(whole, "ensemble", text_input=PROMPT, max_tokens=8, top_k=1).all()
    with InferenceServerClient(whole.grpc) as client:
        result = client.infer("whole_ensemble", prompt_of(8))
        assert result.as_numpy("text_output")[0].decode() == wanted["text_output"][0]
        several = client.infer("whole_ensemble", prompt_of(8, tensor("num_return_sequences", [[3]])))
        assert [text.decode() for text in several.as_numpy("text_output")] == wanted["text_output"] * 3
        with pytest.raises(Exception, match="one response a request, for it is not decoupled"):
            client.infer("whole_ensemble", prompt_of(8, tensor("stream", [[True]], bool)))
        with pytest.raises(Exception, match="max_tokens"):
            client.infer("whole_ensemble", prompt_of(-3))
        assert client.infer("whole_ensemble", prompt_of(8)).as_numpy("text_output") is not None
    body = json.dumps({"text_input": PROMPT, "max_tokens": 8, "top_k": 1}).encode()
    status, answer = whole.post("/v2/models/whole/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, wanted["text_output"][0])
    tensors = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]
    tensors += [
        {"name": n, "shape": [1], "datatype": "INT32", "data": [v]} for n, v in (("max_tokens", 8), ("top_k", 1))
    ]
    call = {"inputs": tensors, "outputs": [{"name": "text_output"}]}
    status, answer = whole.post("/v2/models/whole/infer", json.dumps(call).encode())
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, wanted["text_output"])


def test_unary_calls_run_beside_each_other(whole: Server) -> None:
    """A short request ends while a long one runs."""
    ended: queue.Queue[tuple[str, Any]] = queue.Queue()
    sampling = json.dumps({"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}).encode()
    text = tensor("text_input", [PROMPT.encode()], object)
    with InferenceServerClient(whole.grpc) as client:
        long = [text, tensor("sampling_parameters", [sampling], object)]
        client.async_infer("whole", long, lambda result, error: ended.put(("long", error)))
        short = [text, tensor("max_tokens", [2])]
        client.async_infer("whole", short, lambda result, error: ended.put(("short", error)))
        assert [ended.get(timeout=WAIT_S) for _ in range(2)] == [("short", None), ("long", None)]
