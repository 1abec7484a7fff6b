"""The same completion by every way into the server."""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from engine.serving.link import protocol
from tests.e2e.harness import Call, Server, infer_input, text_of, tokens_of

PROMPT = "A server takes a question and"
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 1234}


def test_streams_one_response_a_token_and_marks_the_last(server: Server) -> None:
    responses = Call(
        server,
        text_input=PROMPT,
        stream=True,
        sampling_parameters=json.dumps(GREEDY),
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    ).all()
    assert 1 < len(responses) <= 24
    assert [r["finish_reason"] for r in responses] == [["None"]] * (len(responses) - 1) + [["length"]]
    assert sum(r["num_output_tokens"][0] for r in responses) == 24 == len(tokens_of(responses))
    assert all(r["num_output_tokens"] == [len(r["token_ids"])] for r in responses)
    assert len({r["num_input_tokens"][0] for r in responses}) == 1


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_way_in_gives_the_same_tokens(server: Server, fields: dict[str, object]) -> None:
    """JSON tensor, JSON with strings for values, request parameters, TensorRT-LLM tensors, token ids, the ensemble."""
    wanted = Call(server, text_input=PROMPT, stream=True, sampling_parameters=json.dumps(fields)).all()
    as_strings = json.dumps({name: str(value) for name, value in fields.items()})
    flat = {name: str(value) if isinstance(value, float) else value for name, value in fields.items()}
    ignore_eos = {"ignore_eos": True}
    tensors = {name: value for name, value in fields.items() if name != "ignore_eos"}
    prompt_ids = Call(server, "tokenizer", text_input=PROMPT).all()[0]["input_ids"]
    ways = {
        "strings": Call(server, text_input=PROMPT, stream=True, sampling_parameters=as_strings),
        "parameters": Call(server, text_input=PROMPT, stream=True, parameters=flat),
        "tensors": Call(server, text_input=PROMPT, stream=True, parameters=ignore_eos, **tensors),
        "ids": Call(server, input_ids=prompt_ids, stream=True, sampling_parameters=json.dumps(fields)),
        "ensemble": Call(server, "ensemble", text_input=PROMPT, stream=True, parameters=ignore_eos, **tensors),
    }
    for way, call in ways.items():
        responses = call.all()
        assert tokens_of(responses) == tokens_of(wanted), way
        assert text_of(responses) == text_of(wanted), way


def test_whole_answer_comes_behind_the_prompt_unless_excluded(server: Server) -> None:
    fields = json.dumps(GREEDY)
    deltas = text_of(Call(server, text_input=PROMPT, stream=True, sampling_parameters=fields).all())
    (whole,) = Call(server, text_input=PROMPT, sampling_parameters=fields).all()
    (bare,) = Call(server, text_input=PROMPT, sampling_parameters=fields, exclude_input_in_output=True).all()
    (joined,) = Call(
        server,
        "ensemble",
        text_input=PROMPT,
        max_tokens=24,
        temperature=0.0,
        end_id=-1,
        parameters={"ignore_eos": True},
    ).all()
    assert whole["text_output"] == [PROMPT + deltas] == joined["text_output"]
    assert bare["text_output"] == [deltas]


def test_http_generate_and_generate_stream(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0, "parameters": {"ignore_eos": True}}
    status, answer = server.post("/v2/models/demo/generate", json.dumps(body).encode())
    assert status == 200
    status, events = server.post("/v2/models/demo/generate_stream", json.dumps({**body, "stream": True}).encode())
    pieces = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: ")]
    assert json.loads(answer)["text_output"] == PROMPT + "".join(piece["text_output"] for piece in pieces)


def test_logprobs_in_vllm_backends_form(server: Server) -> None:
    fields = json.dumps({**GREEDY, "logprobs": 2})
    responses = Call(
        server,
        text_input=PROMPT,
        stream=True,
        sampling_parameters=fields,
        return_logprobs=True,
        return_cumulative_logprob=True,
    ).all()
    entries = [entry for r in responses for entry in json.loads(r["logprobs"][0])]
    tokens = tokens_of(responses)
    assert len(entries) == len(tokens)
    total = 0.0
    for token, entry in zip(tokens, entries, strict=True):
        assert entry[str(token)]["rank"] == 1
        for value in entry.values():
            part_of_a_character = "\ufffd" in value["decoded_token"]
            assert set(value) - {"bytes"} == {"logprob", "rank", "decoded_token"}
            assert ("bytes" in value) == part_of_a_character
        total += entry[str(token)]["logprob"]
    assert responses[-1]["cumulative_logprob"][0] == pytest.approx(total, rel=1e-5)


def test_vllms_sampling_fields_are_request_parameters_of_http_too(server: Server) -> None:
    """The endpoint takes for a tensor what has the name of one: no tensor is called as a field of another kind."""
    plain = {**GREEDY, "max_tokens": 12}

    def generate(more: dict[str, object], **tensors: str) -> str:
        body = {
            "text_input": "The queue module",
            "exclude_input_in_output": True,
            "parameters": plain | more,
            **tensors,
        }
        status, answer = server.post("/v2/models/demo/generate", json.dumps(body).encode())
        assert status == 200, answer
        text: str = json.loads(answer)["text_output"]
        return text

    whole = generate({})
    assert generate({"stop": whole[-4:]}) == whole[:-4]
    assert generate({}, sampling_parameters=json.dumps(plain)) == whole  # vllm_backend's client sends both
    others = {"max_tokens": 2, "temperature": 1.5, "stop": whole[-4:]}
    assert generate(others, sampling_parameters=json.dumps(plain | {"stop": []})) == whole  # there the JSON wins


def test_logprobs_are_null_when_the_parameters_do_not_ask(server: Server) -> None:
    (answer,) = Call(server, text_input=PROMPT, sampling_parameters=json.dumps(GREEDY), return_logprobs=True).all()
    assert answer["logprobs"] == ["null"]


def test_only_what_was_asked_for_comes_back(server: Server) -> None:
    (plain,) = Call(server, text_input=PROMPT, sampling_parameters=json.dumps(GREEDY)).all()
    assert set(plain) == {"text_output", "token_ids"}
    (named,) = Call(server, text_input=PROMPT, sampling_parameters=json.dumps(GREEDY), outputs=["text_output"]).all()
    assert set(named) == {"text_output"}


def test_default_is_sixteen_tokens(server: Server) -> None:
    (answer,) = Call(server, text_input=PROMPT, sampling_parameters='{"ignore_eos": true}').all()
    assert len(answer["token_ids"]) == 16


def test_stop_string_across_token_borders_ends_the_answer_before_it(server: Server) -> None:
    text = text_of(Call(server, text_input=PROMPT, stream=True, sampling_parameters=json.dumps(GREEDY)).all())
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    expected = text[: text.index(stop)]
    stopped = Call(
        server,
        text_input=PROMPT,
        stream=True,
        return_finish_reason=True,
        sampling_parameters=json.dumps({**GREEDY, "stop": stop}),
    ).all()
    through_ensemble = Call(
        server,
        "ensemble",
        text_input=PROMPT,
        max_tokens=24,
        temperature=0.0,
        stream=True,
        stop_words=[stop, ""],
        bad_words=[""],
        parameters={"ignore_eos": True},
    ).all()
    assert text_of(stopped) == expected == text_of(through_ensemble)
    assert stopped[-1]["finish_reason"] == ["stop"]


def test_tokenizer_renders_chats_and_decodes(server: Server) -> None:
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    (rendered,) = Call(server, "tokenizer", messages=messages).all()
    assert rendered["text_output"] == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]
    (decoded,) = Call(server, "tokenizer", token_ids=rendered["input_ids"], skip_special_tokens=False).all()
    assert decoded["text_output"] == rendered["text_output"]


@pytest.mark.parametrize(
    ("further", "source"),
    [
        ({"template_parameters": '{"enable_thinking": false}'}, "messages"),
        ({"skip_special_tokens": False}, "token_ids"),
    ],
)
def test_what_says_nothing_of_a_text_is_refused_with_one(server: Server, further: dict[str, Any], source: str) -> None:
    (name,) = further
    with pytest.raises(InferenceServerException, match=f"{name} goes with {source}, which is not there"):
        Call(server, "tokenizer", text_input="Hi", **further).all()
    neutral = {"template_parameters": "{}", "skip_special_tokens": True, "add_special_tokens": True}
    assert Call(server, "tokenizer", text_input="Hi", **neutral).all()[0]["input_ids"]


def test_frontends_import_no_torch(server: Server) -> None:
    """Asserted in the real stubs: none of their memory maps is a file of torch."""
    stubs = [*server.stub_pids("demo"), *server.stub_pids("tokenizer")]
    assert len(stubs) == 3, "two frontends and the tokenizer"
    for pid in stubs:
        with open(f"/proc/{pid}/maps") as maps:
            assert not [line for line in maps if "/torch/" in line]
    with open(f"/proc/{server.engine_pids('demo')[0]}/maps") as maps:
        assert any("/torch/" in line for line in maps), "the engine process does: the check sees what it looks for"


def test_one_engine_process_for_all_frontends(server: Server) -> None:
    assert len(server.engine_pids("demo")) == 1


def test_refusal_of_a_streamed_echo_is_vllm_backends(server: Server) -> None:
    with pytest.raises(Exception, match="Error generating stream") as caught:
        Call(server, text_input=PROMPT, stream=True, exclude_input_in_output=False).all()
    assert protocol.STREAM_ECHO_REFUSAL in str(caught.value)


def test_vllm_backends_client_sends_its_fields_both_ways(server: Server) -> None:
    """The request of its samples/client.py: strings, as the tensor and as request parameters."""
    fields = {"temperature": "0", "top_p": "0.95", "max_tokens": "8"}
    sent = {"text_input": PROMPT, "sampling_parameters": json.dumps(fields)}
    (whole,) = Call(
        server, parameters=dict(fields), outputs=["text_output"], stream=False, exclude_input_in_output=False, **sent
    ).all()
    assert whole["text_output"] == Call(server, **sent).all()[0]["text_output"]
    streamed = Call(server, parameters=dict(fields), stream=True, exclude_input_in_output=True, **sent).all()
    assert len(tokens_of(streamed)) == 8


def test_tensorrt_llms_client_streams_from_the_ensemble(server: Server) -> None:
    """The request of its end_to_end_grpc_client.py: (1, 1) inputs, empty words, an input that is not excluded; it reads
    `output[0].decode()`."""
    values = {
        "text_input": PROMPT,
        "max_tokens": 8,
        "bad_words": [""],
        "stop_words": [""],
        "stream": True,
        "beam_width": 1,
        "temperature": 1.0,
        "top_k": 1,
        "end_id": -1,
        "exclude_input_in_output": False,
    }
    inputs = [infer_input(name, value, batched=True) for name, value in values.items()]
    received: queue.Queue[Any] = queue.Queue()
    text = ""
    with InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        final = False
        while not final:
            result, error = received.get(timeout=60)
            assert error is None
            final = result.get_response().parameters["triton_final_response"].bool_param
            output = result.as_numpy("text_output")
            if output is not None:
                assert output.shape == (1,)
                text += output[0].decode()
        client.stop_stream()
    wanted = Call(server, text_input=PROMPT, stream=True, max_tokens=8, top_k=1).all()
    assert text == text_of(wanted) != ""


def test_ensemble_lets_out_log_probs_and_counts(server: Server) -> None:
    flags = {f"return_{name}": True for name in ("log_probs", "num_input_tokens", "num_output_tokens", "finish_reason")}
    call = Call(
        server,
        "ensemble",
        text_input=PROMPT,
        max_tokens=6,
        temperature=0.0,
        stream=True,
        parameters={"ignore_eos": True},
        **flags,
    )
    responses = call.all()
    chosen = [value for r in responses for value in r["output_log_probs"]]
    assert len(chosen) == 6 == sum(r["num_output_tokens"][0] for r in responses)
    assert responses[-1]["cum_log_probs"][0] == pytest.approx(sum(chosen), rel=1e-5)
    assert responses[-1]["finish_reason"] == ["length"]


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"beam_width": 2, "temperature": 0.5}, "temperature cannot be combined with beam search"),
        ({"length_penalty": 0.5}, "length_penalty belongs to beam search"),
        ({"return_context_logits": True}, "return_context_logits is not implemented"),
    ],
)
def test_ensemble_refuses_what_is_not_implemented(server: Server, tensors: dict[str, object], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        Call(server, "ensemble", text_input=PROMPT, max_tokens=2, **tensors).all()
    neutral = {"beam_width": 1, "num_return_sequences": 1, "length_penalty": 1.0, "return_context_logits": False}
    assert Call(server, "ensemble", text_input=PROMPT, max_tokens=2, **neutral).all()


@pytest.mark.parametrize("model", ["demo", "ensemble"])
@pytest.mark.parametrize("which", ["context", "generation"])
def test_logits_are_refused_where_their_output_is_named(server: Server, model: str, which: str) -> None:
    """TensorRT-LLM's client names the output together with the flag; without the flag it is not there."""
    values = {"text_input": PROMPT, "max_tokens": 2, "outputs": ["text_output", f"{which}_logits"]}
    with pytest.raises(Exception, match=f"return_{which}_logits is not implemented"):
        Call(server, model, **values, **{f"return_{which}_logits": True}).all()
    (answer,) = Call(server, model, **values, **{f"return_{which}_logits": False}).all()
    assert f"{which}_logits" not in answer
    assert answer["text_output"]


def test_n_answers_come_as_entries_of_one_response(server: Server) -> None:
    """vllm_backend's form: each output has an entry an answer. The first is what the same seed gives alone."""
    fields = {**SAMPLED, "temperature": 1.5, "top_k": 0, "top_p": 1.0}
    (alone,) = Call(server, text_input=PROMPT, sampling_parameters=json.dumps(fields)).all()
    call = {"text_input": PROMPT, "return_num_output_tokens": True, "return_finish_reason": True}
    (whole,) = Call(server, **call, sampling_parameters=json.dumps({**fields, "n": 3})).all()
    assert whole["text_output"][0] == alone["text_output"][0]
    assert len(set(whole["text_output"])) == 3
    assert whole["num_output_tokens"] == [24] * 3
    assert whole["finish_reason"] == ["length"] * 3
    assert whole["token_ids"][:24] == alone["token_ids"]
    streamed = Call(server, **call, stream=True, sampling_parameters=json.dumps({**fields, "n": 3})).all()
    assert all(len(r["text_output"]) == 3 for r in streamed)
    joined = [PROMPT + "".join(r["text_output"][i] for r in streamed) for i in range(3)]
    assert joined == whole["text_output"]
    assert streamed[-1]["finish_reason"] == ["length"] * 3


def test_best_of_gives_the_likeliest(server: Server) -> None:
    fields = {**SAMPLED, "temperature": 1.5, "top_k": 0, "top_p": 1.0}
    call = {"text_input": PROMPT, "return_cumulative_logprob": True, "outputs": ["text_output", "cumulative_logprob"]}
    (every,) = Call(server, **call, sampling_parameters=json.dumps({**fields, "n": 4})).all()
    (best,) = Call(server, **call, sampling_parameters=json.dumps({**fields, "n": 2, "best_of": 4})).all()
    assert best["cumulative_logprob"] == pytest.approx(sorted(every["cumulative_logprob"], reverse=True)[:2], abs=1e-3)
    with pytest.raises(Exception, match="cannot be streamed"):
        Call(server, text_input=PROMPT, stream=True, sampling_parameters='{"best_of": 2}').all()


def test_a_stop_string_ends_one_answer_and_the_others_go_on(server: Server) -> None:
    fields = {**SAMPLED, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "n": 3}
    call = {"text_input": PROMPT, "return_finish_reason": True, "exclude_input_in_output": True}
    (whole,) = Call(server, **call, sampling_parameters=json.dumps(fields)).all()
    stop = next(
        text[i : i + 4]
        for text in whole["text_output"]
        for i in range(5, len(text) - 4)
        if sum(text[i : i + 4] in other for other in whole["text_output"]) == 1
    )
    wanted = [text.partition(stop)[0] for text in whole["text_output"]]
    ends = ["stop" if stop in text else "length" for text in whole["text_output"]]
    stopping = json.dumps({**fields, "stop": stop})
    (ended,) = Call(server, **call, sampling_parameters=stopping).all()
    assert (ended["text_output"], ended["finish_reason"]) == (wanted, ends)
    streamed = Call(server, **call, stream=True, sampling_parameters=stopping).all()
    assert ["".join(r["text_output"][i] for r in streamed) for i in range(3)] == wanted
    assert streamed[-1]["finish_reason"] == ends


@pytest.mark.parametrize("streamed", [False, True])
def test_num_return_sequences_come_apart_as_tensorrt_llms_do(server: Server, streamed: bool) -> None:
    """Its end_to_end_grpc_client.py: `seq_index = result.as_numpy("sequence_index")[0][0]`, a response a sequence."""
    values = {"text_input": PROMPT, "max_tokens": 8, "temperature": 1.5, "seed": 5, "num_return_sequences": 3}
    outputs = ["text_output", "sequence_index"]
    flags = {"stream": streamed, "exclude_input_in_output": True}
    parameters = {"ignore_eos": True}
    responses = Call(server, "ensemble", outputs=outputs, parameters=parameters, **values, **flags).all()
    texts = ["", "", ""]
    for response in responses:
        assert len(response["text_output"]) == 1
        texts[response["sequence_index"][0]] += response["text_output"][0]
    sampling = json.dumps({"max_tokens": 8, "temperature": 1.5, "seed": 5, "n": 3, "ignore_eos": True})
    (together,) = Call(server, text_input=PROMPT, exclude_input_in_output=True, sampling_parameters=sampling).all()
    assert texts == together["text_output"]
    assert len(responses) == 3 if not streamed else len(responses) > 3


def test_embedding_bias_draws_tensorrt_llms_words(server: Server) -> None:
    """Every token of the words is made likelier by the weight; without them greedy tokens are others."""
    words = {"embedding_bias_words": ["queue", ""], "embedding_bias_weights": [500.0, 1.0]}
    call = {"text_input": PROMPT, "max_tokens": 6, "temperature": 0.0, "parameters": {"ignore_eos": True}}
    tokens = set(Call(server, "tokenizer", text_input="queue", add_special_tokens=False).all()[0]["input_ids"])
    for model in ("demo", "ensemble"):
        assert set(tokens_of(Call(server, model, **call, **words, stream=True).all())) <= tokens
    with pytest.raises(Exception, match="has 1 words and embedding_bias_weights 2 weights"):
        Call(server, **call, embedding_bias_words=["a"], embedding_bias_weights=[1.0, 2.0]).all()
    with pytest.raises(Exception, match="must lie between"):
        Call(server, **call, embedding_bias_words=["a"], embedding_bias_weights=[float("nan")]).all()


def test_a_beam_search_gives_its_answers_the_likeliest_first(server: Server) -> None:
    """The request of end_to_end_grpc_client.py -b 3: its temperature of 1 asks for nothing."""
    asked = {"text_input": PROMPT, "max_tokens": 10, "temperature": 1.0, "exclude_input_in_output": True}
    (found,) = Call(
        server, "ensemble", **asked, beam_width=3, return_log_probs=True, return_num_output_tokens=True
    ).all()
    assert len(found["text_output"]) == 3 == len(set(found["text_output"]))
    scores = [total / count for total, count in zip(found["cum_log_probs"], found["num_output_tokens"], strict=True)]
    assert scores == sorted(scores, reverse=True)
    each = np.reshape(found["output_log_probs"], (3, -1))
    assert each.sum(1).tolist() == pytest.approx(list(found["cum_log_probs"]), rel=1e-5)
    same = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 10}
    (two,) = Call(server, text_input=PROMPT, parameters=same, exclude_input_in_output=True).all()
    assert two["text_output"] == found["text_output"][:2]
