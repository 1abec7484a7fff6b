"""Locust users that stream completions and report what matters of a stream: TTFT, ITL and E2E.

    locust -f perf/locustfile.py --host http://localhost:8000 --grpc localhost:8001

Choose users by name behind the options: GrpcStreamUser, GenerateStreamUser. Without `--headless` there is a web page
on port 8089. The exit status is 1 when a request failed or a threshold (`--max-ttft-ms`, `--max-itl-ms`, both p95)
was passed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# locust puts this folder first, where perf/engine.py would be taken for the package `engine`
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

import grpc
from grpc.experimental import gevent as grpc_gevent
from locust import User, constant, events, task
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
    group.add_argument("--words", type=int, default=32, help="words of a prompt")
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
    """Sends one streamed request after the other. A subclass says how one is sent."""

    abstract = True
    wait_time = constant(0)
    way = ""

    @task
    def complete(self) -> None:
        options = self.environment.parsed_options
        prompt = " ".join(random.choices(WORDS, k=options.words))
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True)
        start = last = time.perf_counter()
        count = 0
        try:
            for num_tokens in self.responses(prompt, params):
                now = time.perf_counter()
                if count:
                    self._fire("ITL", now - last, num_tokens)
                else:
                    self._fire("TTFT", now - start, num_tokens)
                count, last = count + num_tokens, now
            if count != params.max_tokens:
                raise RuntimeError(f"{count} tokens came instead of {params.max_tokens}")
        except Exception as error:
            self._fire("E2E", time.perf_counter() - start, count, error)
            return
        self._fire("E2E", last - start, count)

    def responses(self, prompt: str, params: SamplingParams) -> Iterator[int]:
        """Send one request and yield the number of tokens of each response as it comes."""
        raise NotImplementedError

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
        self._channel = grpc.insecure_channel(self.environment.parsed_options.grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def on_stop(self) -> None:
        self._channel.close()

    def responses(self, prompt: str, params: SamplingParams) -> Iterator[int]:
        request = service_pb2.ModelInferRequest(model_name=self.environment.parsed_options.llm)
        for tensor in generation_inputs(prompt, params, stream=True):
            request.inputs.append(tensor._get_tensor())
            request.raw_input_contents.append(tensor._get_content())
        for response in self._stub.ModelStreamInfer(iter([request])):
            if response.error_message:
                raise RuntimeError(response.error_message)
            for output in response.infer_response.outputs:
                if output.name == "token_ids":
                    yield int(output.shape[0])


class GenerateStreamUser(StreamUser):
    """HTTP generate_stream: JSON in, server-sent events out."""

    way = "HTTP generate_stream"

    def responses(self, prompt: str, params: SamplingParams) -> Iterator[int]:
        body = {
            "text_input": prompt,
            "stream": True,
            "return_num_output_tokens": True,
            "sampling_parameters": json.dumps(
                {"max_tokens": params.max_tokens, "temperature": params.temperature, "ignore_eos": params.ignore_eos}
            ),
        }
        address = urlsplit(self.host or "http://localhost:8000").netloc
        for event in generate_stream(address, self.environment.parsed_options.llm, body):
            if "num_output_tokens" in event:
                yield int(event["num_output_tokens"])
