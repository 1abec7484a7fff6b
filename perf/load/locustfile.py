"""Locust users that stream completions and report what matters of a stream: TTFT, ITL and E2E.

    locust -f perf/load/locustfile.py GrpcStreamUser GenerateStreamUser \\
        --host http://localhost:8000 --grpc localhost:8001

Users, chosen by name: GrpcStreamUser, GenerateStreamUser (HTTP server-sent events), OpenAIChatUser (the shim, one
question each), SharedPrefixChatUser (the shim, conversations of several turns below one long system message). Name at
least one, else all of them run.

Arrivals: each user sends one request after the other; `--rate R` makes it wait so that it sends R a second, at random
moments (Poisson); `--burst N` makes it send N at a time. `--long-share` mixes long prompts in. Without `--headless`
there is a web page on port 8089. The exit status is 1 when a request failed, or when a threshold was passed
(`--max-ttft-ms`, `--max-itl-ms`, of the p95).
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# locust puts this folder first, and not the one that the packages are found in
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parents[1]), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

import gevent
import grpc
import msgspec
from gevent.pool import Group
from grpc.experimental import gevent as grpc_gevent
from locust import User, events, task
from locust.env import Environment
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients.python.generate_stream import generate_stream
from clients.python.wire import generation_inputs
from engine.types import SamplingParams

grpc_gevent.init_gevent()  # else gRPC's own threads would stop the other users

WORDS = ("the", "server", "takes", "a", "question", "and", "gives", "back", "an", "answer", "one", "word", "after")


@events.init_command_line_parser.add_listener
def _options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("streaming")
    group.add_argument("--grpc", default="localhost:8001", help="host:port of the server's gRPC")
    group.add_argument("--llm", default="demo", help="LLM model to load")
    group.add_argument("--openai", default="localhost:9000", help="host:port of the shim")
    group.add_argument("--openai-key-file", help="file whose first line is the shim's API key")
    group.add_argument("--words", type=int, default=32, help="words of a prompt")
    group.add_argument("--long-words", type=int, default=512, help="words of a long prompt")
    group.add_argument("--long-share", type=float, default=0.0, help="share of long prompts, 0 to 1")
    group.add_argument("--turns", type=int, default=4, help="turns of a conversation (SharedPrefixChatUser)")
    group.add_argument("--rate", type=float, default=0.0, help="requests a second of each user; 0: one after the other")
    group.add_argument("--burst", type=int, default=1, help="requests that a user sends at once")
    group.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer")
    group.add_argument("--max-ttft-ms", type=float, default=0.0, help="fail when TTFT p95 is above; 0: no threshold")
    group.add_argument("--max-itl-ms", type=float, default=0.0, help="fail when ITL p95 is above; 0: no threshold")


@events.quitting.add_listener
def _judge(environment: Environment, **_: Any) -> None:
    options: Any = environment.parsed_options
    limits = {"TTFT": options.max_ttft_ms, "ITL": options.max_itl_ms}
    for (name, kind), entry in environment.stats.entries.items():
        p95 = entry.get_response_time_percentile(0.95) or 0.0
        if limits.get(kind) and p95 > limits[kind]:
            print(f"{kind} p95 of {name} is {p95:.0f} ms, above the threshold of {limits[kind]:.0f} ms")
            environment.process_exit_code = 1
    if environment.stats.total.num_failures:
        environment.process_exit_code = 1


class StreamUser(User):
    """Sends streamed requests. A subclass says how one is sent."""

    abstract = True
    way = ""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.options: Any = environment.parsed_options
        self._arrivals = Group()

    def wait_time(self) -> float:
        """Seconds to the next request: exponential for a rate, so that arrivals are a Poisson process."""
        return random.expovariate(self.options.rate) if self.options.rate else 0.0

    @task
    def send(self) -> None:
        if self.options.rate:
            self._arrivals.spawn(self.complete)  # an arrival does not wait for the answer before
        else:
            gevent.joinall([gevent.spawn(self.complete) for _ in range(self.options.burst)])

    def on_stop(self) -> None:
        """Requests that are on their way end by themselves, within locust's --stop-timeout."""
        self._arrivals.join()

    def complete(self) -> None:
        """One request, measured. A failure is reported as one, under E2E."""
        start = last = time.perf_counter()
        count = 0
        try:
            for num_tokens in self.responses():
                now = time.perf_counter()
                if count:
                    self._fire("ITL", now - last, num_tokens)
                else:
                    self._fire("TTFT", now - start, num_tokens)
                count, last = count + num_tokens, now
            if count != self.options.max_tokens:
                raise RuntimeError(f"{count} tokens came instead of {self.options.max_tokens}")
        except Exception as error:
            self._fire("E2E", time.perf_counter() - start, count, error)
            return
        self._fire("E2E", last - start, count)

    def responses(self) -> Iterator[int]:
        """Send one request and yield the number of tokens of each response as it comes."""
        raise NotImplementedError

    def prompt(self) -> str:
        long = random.random() < self.options.long_share
        return " ".join(random.choices(WORDS, k=self.options.long_words if long else self.options.words))

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.options.max_tokens, temperature=0.0, ignore_eos=True)

    def _fire(self, kind: str, seconds: float, num_tokens: int, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=self.way,
            response_time=seconds * 1e3,
            response_length=num_tokens,
            exception=error,
            context={},
        )


class GrpcStreamUser(StreamUser):
    """vllm_backend's tensors over a gRPC stream."""

    way = "gRPC stream"

    def on_start(self) -> None:
        self._channel = grpc.insecure_channel(self.options.grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def on_stop(self) -> None:
        super().on_stop()
        self._channel.close()

    def responses(self) -> Iterator[int]:
        request = service_pb2.ModelInferRequest(model_name=self.options.llm)
        for tensor in generation_inputs(self.prompt(), self.params(), stream=True):
            request.inputs.append(tensor._get_tensor())
            request.raw_input_contents.append(tensor._get_content())
        for response in self._stub.ModelStreamInfer(iter([request])):
            if response.error_message:
                raise RuntimeError(response.error_message)
            inner = response.infer_response
            for output, raw in zip(inner.outputs, inner.raw_output_contents, strict=False):
                if output.name == "error":
                    raise RuntimeError(raw[4:].decode())  # past the length of the string
                if output.name == "token_ids":
                    yield int(output.shape[0])


class GenerateStreamUser(StreamUser):
    """HTTP generate_stream: JSON in, server-sent events out."""

    way = "HTTP generate_stream"

    def responses(self) -> Iterator[int]:
        body = {
            "text_input": self.prompt(),
            "stream": True,
            "return_num_output_tokens": True,
            "sampling_parameters": msgspec.json.encode(self.params()).decode(),
        }
        address = urlsplit(self.host or "http://localhost:8000").netloc
        for event in generate_stream(address, self.options.llm, body):
            if "num_output_tokens" in event:
                yield int(event["num_output_tokens"])


class OpenAIChatUser(StreamUser):
    """/v1/chat/completions of the shim, streamed. Tokens are counted by the usage that comes with each chunk."""

    way = "OpenAI chat"

    def responses(self) -> Iterator[int]:
        return self.answer([{"role": "user", "content": self.prompt()}], [])

    def answer(self, messages: list[dict[str, str]], text: list[str]) -> Iterator[int]:
        """Send a chat, append its text to `text`, yield the number of tokens of each chunk."""
        body = {
            "model": self.options.llm,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": self.options.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self.options.openai)
        try:
            headers = {"Content-Type": "application/json"}
            if self.options.openai_key_file:
                headers["Authorization"] = f"Bearer {Path(self.options.openai_key_file).read_text().split()[0]}"
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read().decode(errors='replace')}")
            seen = 0
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                text.extend(choice["delta"].get("content") or "" for choice in event["choices"])
                now = event["usage"]["completion_tokens"]
                if now > seen:
                    yield now - seen
                    seen = now
        finally:
            connection.close()


class SharedPrefixChatUser(OpenAIChatUser):
    """Conversations: every user's system message is the same, and each turn holds the turns before it."""

    way = "OpenAI chat, shared prefix"
    system = " ".join(random.Random(0).choices(WORDS, k=256))

    def on_start(self) -> None:
        self._history: list[dict[str, str]] = []

    def responses(self) -> Iterator[int]:
        if len(self._history) >= 2 * self.options.turns:
            self._history = []
        question = {"role": "user", "content": self.prompt()}
        text: list[str] = []
        yield from self.answer([{"role": "system", "content": self.system}, *self._history, question], text)
        self._history += [question, {"role": "assistant", "content": "".join(text)}]
