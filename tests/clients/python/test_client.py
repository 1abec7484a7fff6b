"""The client against the real server."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from clients.python import AsyncClient, Client, SamplingParams, ServerError, top
from clients.python.local_server import LocalServer

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
PROMPT = "A server takes a question and"


def test_a_stream_is_the_whole_answer_in_pieces(client: Client) -> None:
    chunks = list(client.stream(PROMPT, GREEDY))
    whole = client.complete(PROMPT, GREEDY)
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == whole.token_ids
    assert len(whole.token_ids) == 12
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert whole.finish_reason == "length"


def test_text_and_its_token_ids_are_the_same_prompt(client: Client) -> None:
    ids = client.tokenize(PROMPT)
    assert client.detokenize(ids) == PROMPT
    assert client.complete(ids, GREEDY).token_ids == client.complete(PROMPT, GREEDY).token_ids
    assert client.complete(PROMPT, GREEDY).num_input_tokens == len(ids)


def test_logprobs_come_a_token_each(client: Client) -> None:
    answer = client.complete(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2))
    assert answer.logprobs is not None
    chosen = [entry[str(i)]["logprob"] for i, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_prompt_logprobs_come_a_prompt_token_each(client: Client) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    ids = client.tokenize(PROMPT)
    values = client.complete(PROMPT, params).prompt_logprobs
    assert values is not None
    assert [entry and list(entry) for entry in values] == [None, *([str(i)] for i in ids[1:])]
    streamed = [chunk.prompt_logprobs for chunk in client.stream(PROMPT, params)]
    assert streamed == [values, *([None] * (len(streamed) - 1))]


@pytest.mark.parametrize("ids", [[2**31], [2**40], [5, 1.5], ["5"], [True]])
def test_ids_that_are_no_32_bit_integers_are_refused(client: Client, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="32-bit integers"):
        client.complete(ids, GREEDY)


def test_a_batch_without_a_place_to_run_in_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        client.batch([PROMPT], GREEDY, at_once=0)


def test_a_batch_keeps_the_order_of_its_prompts(client: Client) -> None:
    prompts = [PROMPT + " and" * n for n in range(10)]
    lengths = [len(client.tokenize(prompt)) for prompt in prompts]
    assert len(set(lengths)) == len(prompts)
    # Not by their tokens: a near tie may fall either way beside others.
    together = client.batch(prompts, GREEDY, at_once=4)
    assert [answer.num_input_tokens for answer in together] == lengths


def test_a_chat_goes_through_the_checkpoints_template(client: Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ids = client.chat_ids(messages)
    shown = client.detokenize(ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    streamed = "".join(chunk.text for chunk in client.stream_chat(messages, GREEDY))
    assert streamed == client.chat(messages, GREEDY).text == client.complete(ids, GREEDY).text
    opened = [*messages, {"role": "assistant", "content": "Well"}]
    continued = client.chat_ids(opened, continue_final_message=True)
    assert client.detokenize(continued, skip_special_tokens=False) == shown + "Well"


def test_a_chat_that_can_only_be_too_long_is_not_tokenized(client: Client) -> None:
    messages = [{"role": "user", "content": "a" * (2 << 20)}]
    for answer in (client.chat, lambda asked: next(client.stream_chat(asked))):
        with pytest.raises(ServerError, match=r"has \d+ tokens or more, but at most \d+ can be served"):
            answer(messages)  # type: ignore[operator]


def test_refusals_are_sentences_with_a_code(client: Client, server: LocalServer) -> None:
    with pytest.raises(ServerError, match="context") as caught:
        client.complete([5] * 9000, GREEDY)
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ServerError, match="messages is empty"):
        client.chat_ids([])
    with Client(server.grpc, model="nothing") as other, pytest.raises(ServerError, match="nothing"):
        other.complete(PROMPT)


def test_many_failures_at_once_leave_the_server_whole(client: Client, server: LocalServer) -> None:
    """With Triton's triton_grpc_error header, the other way to have codes, tritonserver 2.51 crashed here."""

    async def fail_all() -> set[str]:
        async with AsyncClient(server.grpc) as many:
            wrong = [many.complete([10**6 + n], GREEDY) for n in range(200)]
            outcomes = await asyncio.gather(*wrong, return_exceptions=True)
        return {outcome.code if isinstance(outcome, ServerError) else repr(outcome) for outcome in outcomes}

    for _ in range(3):
        assert asyncio.run(fail_all()) == {"INVALID_ARGUMENT"}
    assert len(client.complete(PROMPT, GREEDY).token_ids) == 12
    assert "internal" not in server.log().lower()


def test_leaving_a_stream_cancels_its_request(client: Client, server: LocalServer) -> None:
    chunks = client.stream(PROMPT, LONG)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    wait_idle(server)


def test_many_streams_at_once_on_one_client(server: LocalServer) -> None:
    async def first_chunks() -> list[int]:
        async with AsyncClient(server.grpc) as client:

            async def one(n: int) -> int:
                async with aclosing(client.stream(f"{PROMPT} {n}", LONG)) as chunks:
                    async for chunk in chunks:
                        return len(chunk.token_ids)
                return 0

            return await asyncio.gather(*[one(n) for n in range(12)])

    assert min(asyncio.run(first_chunks())) >= 1
    wait_idle(server)


def test_no_server_is_not_ready() -> None:
    with Client("127.0.0.1:9") as client:
        assert not client.ready()
        with pytest.raises(ServerError) as caught:
            client.complete(PROMPT)
        assert caught.value.code == "UNAVAILABLE"


def wait_idle(server: LocalServer) -> None:
    """Fail unless the engine runs nothing within ten seconds (metrics come every half second)."""
    end = time.monotonic() + 10
    while True:
        running = top.read(f"http://{server.metrics}/metrics").models["demo"]["num_requests_running"]
        if running == 0:
            return
        assert time.monotonic() < end, f"{running} requests still run"
        time.sleep(0.2)
