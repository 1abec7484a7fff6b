"""Text completions against a real server, through the official client and plain HTTP."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from clients.python.local_server import LocalServer
from clients.python.sync import Client
from engine.types import SamplingParams
from tests.clients.conftest import SCRIPTED, Shim, gauges, until

pytestmark = pytest.mark.xdist_group("openai")

PROMPT = "def read(path):"


@pytest.fixture(scope="module")
def sdk(shim: Shim) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)


def post(shim: Shim, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(shim.url + path, json={"model": "demo", **body}, timeout=60)


def complete(shim: Shim, **body: Any) -> dict[str, Any]:
    response = post(shim, **{"prompt": PROMPT, "temperature": 0, "max_tokens": 6, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def chunks(shim: Shim, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion; the stream must end with [DONE]."""
    response = post(shim, **{"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_the_tokens_are_those_of_triton_itself(server: LocalServer, shim: Shim) -> None:
    with Client(server.grpc, "demo") as client:
        assert client.tokenize(PROMPT) == post(shim, "/tokenize", prompt=PROMPT).json()["tokens"]
        direct = client.complete(PROMPT, SamplingParams(max_tokens=12, temperature=0.0))
    answer = complete(shim, max_tokens=12, return_token_ids=True)
    assert texts(answer) == [direct.text]
    assert answer["choices"][0]["token_ids"] == list(direct.token_ids)
    assert answer["usage"]["completion_tokens"] == 12


def test_the_official_client_reads_answers_and_streams(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=8)
    assert whole.object == "text_completion"
    assert whole.id == f"cmpl-{whole._request_id}"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    stream = sdk.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert {piece.id for piece in pieces} == {pieces[0].id}
    assert pieces[0].id != whole.id
    assert "".join(c.text for piece in pieces for c in piece.choices) == whole.choices[0].text
    assert [c.finish_reason for piece in pieces for c in piece.choices][-1] == "length"
    assert pieces[-1].choices == []
    assert pieces[-1].usage == whole.usage or pieces[-1].usage.completion_tokens == 8  # type: ignore[union-attr]


def test_prompts_may_be_text_ids_or_lists_of_either(shim: Shim) -> None:
    ids = [post(shim, "/tokenize", prompt=p).json()["tokens"] for p in (PROMPT, "class Shelf")]
    expected = [texts(complete(shim, prompt=p))[0] for p in (PROMPT, "class Shelf")]
    assert texts(complete(shim, prompt=ids[0])) == expected[:1]
    assert texts(complete(shim, prompt=[PROMPT, "class Shelf"])) == expected
    both = complete(shim, prompt=ids)
    assert texts(both) == expected
    assert both["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert both["usage"]["completion_tokens"] == 12


def test_the_first_of_n_choices_is_the_only_one_of_one(shim: Shim) -> None:
    sampled = {"temperature": 1, "seed": 5, "max_tokens": 8}
    three = texts(complete(shim, n=3, **sampled))
    assert len(set(three)) == 3
    assert texts(complete(shim, n=3, **sampled)) == three
    assert texts(complete(shim, **sampled)) == three[:1]
    streamed = ["", "", ""]
    for chunk in chunks(shim, n=3, **sampled):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == three


def test_n_choices_of_a_prompt_share_its_blocks(server: LocalServer, shim: Shim) -> None:
    before = gauges(server)["prefix_cache_hits_total"]
    answer = complete(shim, prompt="shared beginning " * 60, n=3, temperature=1, seed=1, max_tokens=4)
    assert len(texts(answer)) == 3
    prompt = answer["usage"]["prompt_tokens"]
    until(
        lambda: gauges(server)["prefix_cache_hits_total"] - before > 2 * (prompt - 64), 5, "the choices share no blocks"
    )


def test_best_of_gives_the_likeliest(shim: Shim) -> None:
    sampled = {"temperature": 1, "seed": 9, "max_tokens": 6, "logprobs": 0}
    every = complete(shim, n=4, **sampled)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 6 for c in every]
    best = every[means.index(max(means))]["text"]
    answer = complete(shim, best_of=4, **sampled)
    assert texts(answer) == [best]
    assert answer["usage"]["completion_tokens"] == 24


def test_echo_repeats_the_prompt(shim: Shim) -> None:
    plain = texts(complete(shim))[0]
    assert texts(complete(shim, echo=True)) == [PROMPT + plain]
    ids = post(shim, "/tokenize", prompt=PROMPT).json()["tokens"]
    assert texts(complete(shim, prompt=ids, echo=True)) == [PROMPT + plain]
    streamed = "".join(c["text"] for chunk in chunks(shim, echo=True) for c in chunk["choices"])
    assert streamed == PROMPT + plain


@pytest.mark.parametrize("prompt", [PROMPT, "20 °C, 世界 \U0001f30d and so on"], ids=["ascii", "unicode"])
def test_the_prompt_alone_can_be_scored(shim: Shim, prompt: str) -> None:
    answer = complete(shim, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == prompt
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    known = list(zip(logprobs["text_offset"], logprobs["tokens"], strict=True))
    assert all(prompt[at:].startswith(token) for at, token in known if token != "\ufffd")  # a part of a character
    assert {at + k for at, token in known for k in range(len(token))} == set(range(len(prompt)))
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"]


def test_logprobs_belong_to_their_tokens(shim: Shim) -> None:
    answer = complete(shim, logprobs=3, return_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 6
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values())  # greedy: the chosen one is the likeliest
    streamed = [c["logprobs"] for chunk in chunks(shim, logprobs=3) for c in chunk["choices"] if c["logprobs"]]
    assert [t for one in streamed for t in one["tokens"]] == logprobs["tokens"]
    assert [o for one in streamed for o in one["text_offset"]] == logprobs["text_offset"]


def test_prompt_logprobs_have_an_entry_a_token(shim: Shim) -> None:
    answer = complete(shim, prompt_logprobs=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert all(min(e["rank"] for e in entry.values()) == 1 for entry in entries[1:])


def test_a_stop_string_ends_the_answer(shim: Shim) -> None:
    plain = texts(complete(shim, max_tokens=12))[0]
    stop = plain[len(plain) // 2 :][:3]
    answer = complete(shim, max_tokens=12, stop=stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert texts(answer) == [plain[: plain.index(stop)]]
    kept = complete(shim, max_tokens=12, stop=[stop], include_stop_str_in_output=True)
    assert texts(kept) == [plain[: plain.index(stop) + len(stop)]]
    assert complete(shim, max_tokens=12)["choices"][0]["finish_reason"] == "length"


def test_tokens_can_be_forced_and_forbidden(shim: Shim) -> None:
    only = complete(shim, allowed_token_ids=[70], return_token_ids=True)["choices"][0]["token_ids"]
    assert only == [70] * 6
    pushed = complete(shim, logit_bias={"71": 100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert pushed == [71] * 6
    free = complete(shim, return_token_ids=True)["choices"][0]["token_ids"]
    barred = complete(shim, logit_bias={str(free[0]): -100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert barred[0] != free[0]


def test_the_prompt_can_be_cut_from_the_left(shim: Shim) -> None:
    ids = post(shim, "/tokenize", prompt=PROMPT).json()["tokens"]
    answer = complete(shim, truncate_prompt_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-3:]
    assert answer["usage"]["prompt_tokens"] == 3


def test_usage_can_come_with_every_chunk(shim: Shim) -> None:
    counts = [
        chunk["usage"]["completion_tokens"] for chunk in chunks(shim, stream_options={"continuous_usage_stats": True})
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all("usage" not in chunk for chunk in chunks(shim))


def test_tokens_of_logprobs_are_named_by_their_ids_on_request(shim: Shim) -> None:
    fields = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = complete(shim, **fields)["choices"]
    ids = choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    for i, top in zip(ids, choice["logprobs"]["top_logprobs"], strict=True):
        assert f"token_id:{i}" in top
        assert all(name.startswith("token_id:") for name in top)
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (said,) = httpx.post(f"{shim.url}/v1/chat/completions", json=body).json()["choices"]
    entries = said["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in said["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    plain = httpx.post(f"{shim.url}/v1/chat/completions", json=body | {"return_tokens_as_token_ids": False}).json()
    assert [e["bytes"] for e in plain["choices"][0]["logprobs"]["content"]] == [e["bytes"] for e in entries]


def test_a_prompt_seen_before_comes_from_the_cache(shim: Shim) -> None:
    prompt = "once and once more " * 20
    complete(shim, prompt=prompt)
    usage = complete(shim, prompt=prompt)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_the_engine_refuses_in_the_api_error_shape(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model="demo", prompt=[5] * 9000, max_tokens=4)
    assert "context" in long.value.message
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as talk:
        sdk.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 9000}])
    assert (talk.value.code, talk.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match=r"of \d+ bytes has \d+ tokens or more") as never:
        sdk.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 300_000}])
    assert (never.value.code, never.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as empty:
        sdk.completions.create(model="demo", prompt="", max_tokens=4)
    assert "no tokens" in empty.value.message
    with pytest.raises(openai.BadRequestError) as bias:
        sdk.completions.create(model="demo", prompt="x", logit_bias={"999999": 1})
    assert (bias.value.code, bias.value.param) == ("invalid_value", "logit_bias")
    with pytest.raises(openai.BadRequestError) as outside:
        sdk.completions.create(model="demo", prompt=[10**6], max_tokens=4)
    assert "1000000" in outside.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.completions.create(model="nope", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as field:
        sdk.completions.create(model="demo", prompt="x", extra_body={"length_penalty": 2.0})
    assert (field.value.code, field.value.param) == ("unsupported_parameter", "length_penalty")


BEAMS = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}


def test_a_beam_search_gives_its_answers_the_likeliest_first(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": ["The queue", "A server takes"], "max_tokens": 6, "logprobs": 1}
    found = sdk.completions.create(**asked, n=3, extra_body=BEAMS)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage is not None
    assert found.usage.completion_tokens == 36
    for prompt in (found.choices[:3], found.choices[3:]):
        sums = [sum(choice.logprobs.token_logprobs) for choice in prompt]  # type: ignore[union-attr,arg-type]
        assert sums == sorted(sums, reverse=True)
        assert len({tuple(choice.token_ids) for choice in prompt}) == 3  # type: ignore[attr-defined]
    best = sdk.completions.create(**asked, n=1, best_of=3, extra_body=BEAMS)
    assert [choice.text for choice in best.choices] == [found.choices[0].text, found.choices[3].text]
    told: dict[int, str] = {}
    for chunk in sdk.completions.create(**asked, n=3, stream=True, extra_body=BEAMS):
        for choice in chunk.choices:
            told[choice.index] = told.get(choice.index, "") + choice.text
    assert [told[index] for index in range(6)] == [choice.text for choice in found.choices]


def test_one_beam_is_greedy(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "The queue", "max_tokens": 6}
    beam = sdk.completions.create(**asked, extra_body={"use_beam_search": True})
    assert beam.choices[0].text == sdk.completions.create(**asked, temperature=0).choices[0].text


def test_a_chat_by_beams(sdk: openai.OpenAI) -> None:
    ask: Any = [{"role": "user", "content": "How do I open a file?"}]
    found = sdk.chat.completions.create(model="demo", messages=ask, max_tokens=6, n=2, extra_body=BEAMS)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].token_ids != found.choices[1].token_ids  # type: ignore[attr-defined]


def test_a_bad_prompt_among_good_ones_fails_the_request_before_it_streams(shim: Shim) -> None:
    response = post(shim, prompt=[[5], [10**6]], stream=True, max_tokens=2)
    assert response.status_code == 400
    assert "1000000" in response.json()["error"]["message"]


def test_a_deadline_ends_a_request(shim: Shim) -> None:
    response = post(shim, prompt=PROMPT, max_tokens=8000, timeout=0.3, ignore_eos=True)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"
    assert "ran past its timeout" in response.json()["error"]["message"]


def test_models_are_listed_and_found(sdk: openai.OpenAI) -> None:
    assert {model.id for model in sdk.models.list()} == {"demo", "scripted"}
    demo = sdk.models.retrieve("demo")
    assert demo.object == "model"
    assert time.time() - demo.created < 3600
    # the engine's own number, not the checkpoint's: one token more is refused, as many are not
    model = "scripted"
    longest = sdk.models.retrieve(model).max_model_len
    assert longest == int(SCRIPTED["max_model_len"]) < demo.max_model_len
    assert sdk.completions.create(model=model, prompt=[5] * (longest - 1), max_tokens=1).usage.total_tokens == longest
    with pytest.raises(openai.BadRequestError):
        sdk.completions.create(model=model, prompt=[5] * longest, max_tokens=1)
    with pytest.raises(openai.BadRequestError) as answer:
        sdk.completions.create(model=model, prompt=[5], max_tokens=longest)
    assert answer.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nope")


def test_text_and_tokens_go_both_ways(shim: Shim) -> None:
    answer = post(shim, "/tokenize", prompt="wörld \U0001f30d", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert post(shim, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "wörld \U0001f30d"}
    assert post(shim, "/detokenize", tokens=[10**6]).json()["error"]["param"] == "tokens"
    chat = post(shim, "/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    assert post(shim, "/detokenize", tokens=chat["tokens"]).json()["prompt"].endswith("<|im_start|>assistant\n")


def test_health_tells_by_a_real_token(shim: Shim) -> None:
    assert httpx.get(f"{shim.url}/health").json()["models"] == ["demo", "scripted"]
    head = httpx.head(f"{shim.url}/health")
    assert (head.status_code, head.content) == (200, b"")
    assert httpx.get(f"{shim.url}/health/generate", timeout=20).json()["models"] == {"demo": "ok", "scripted": "ok"}
