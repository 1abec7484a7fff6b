"""Requests that mean harm: each must be served or refused with a sentence, in time, and cost nobody else anything."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.chaos.clients import Ask, perform
from tests.chaos.fleet import Fleet, Replica

_IN_TIME_S, _GIVEN_UP_S = 15.0, 60.0
_MAX_ANSWER = 10_000  # bytes
_TRACES = ("Traceback", "site-packages", 'File "')
REFUSALS = {400, 413, 414, 422, 429, 431, 501, 503}


class LateError(Exception):
    """An answer came, or was given up, after `seconds`, where it should have come within `limit_s`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {_IN_TIME_S:g} s")
        self.seconds, self.limit_s = seconds, _IN_TIME_S


Body = Callable[[Fleet, Replica], "str | None"]


def body(path: str, fields: dict[str, Any], about: str, statuses: frozenset[int] = frozenset(REFUSALS)) -> Body:
    """A request to the shim. A field that is a function is called for its value: some are large. about: a word
    that its refusal must have, so that it is refused for what it is."""

    def send(fleet: Fleet, replica: Replica) -> str | None:
        made = {name: value() if callable(value) else value for name, value in fields.items()}
        asked = {"model": "demo", "max_tokens": 2, **made}
        began = time.monotonic()
        try:
            answer = httpx.post(f"{fleet.shim.url}{path}", json=asked, timeout=_GIVEN_UP_S)
        except httpx.TimeoutException:
            raise LateError(time.monotonic() - began) from None
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if (took := time.monotonic() - began) > _IN_TIME_S:
            raise LateError(took)
        problem = judged(answer.status_code, answer.text, statuses)
        if problem is None and answer.status_code != 200 and about not in answer.text:
            return f"{answer.status_code} says nothing of {about}: {answer.text[:300]}"
        return problem

    return send


def judged(status: int, text: str, statuses: frozenset[int]) -> str | None:
    """What is wrong with an answer, if anything."""
    if any(mark in text for mark in _TRACES):
        return f"a stack trace reaches the client: {status} {text[:300]}"
    if status not in statuses:
        return f"{status} {text[:300]}"
    return f"an answer of {len(text)} bytes" if len(text) > _MAX_ANSWER else None


def raw_shape(dims: list[int], content: bytes = b"", name: str = "input_ids") -> Body:
    """One gRPC message with a shape that its content does not fill (but by a count of bytes that overflows to it)."""

    def send(fleet: Fleet, replica: Replica) -> str | None:
        request = service_pb2.ModelInferRequest(model_name="demo")
        tensor = request.inputs.add(name=name, datatype="INT32")
        tensor.shape.extend(dims)
        request.raw_input_contents.append(content)
        before = replica.pids("frontend")
        with grpc.insecure_channel(replica.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with contextlib.suppress(grpc.RpcError):  # a refusal, or what the dead stub's server says
                list(stub.ModelStreamInfer(iter([request]), timeout=_IN_TIME_S))
        time.sleep(0.3)
        dead = set(before) - set(replica.pids("frontend"))
        return f"the frontend {dead} died of it" if dead else None

    return send


def endless_header(size: int) -> Body:
    """One header that does not end."""

    def send(fleet: Fleet, replica: Replica) -> str | None:
        piece = b"a" * 65536
        with socket.create_connection(("127.0.0.1", fleet.shim.port), timeout=_IN_TIME_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
            try:
                for _ in range(size // len(piece)):
                    connection.sendall(piece)
            except OSError:
                return None  # cut off
            try:
                answer = connection.recv(4096)  # a worker that is busy has it from the kernel later
            except TimeoutError:
                return f"{size} bytes of an unfinished header were taken"
            except OSError:
                return None
        return None if not answer or b" 431 " in answer or b" 400 " in answer else repr(answer[:100])

    return send


def _chat(about: str, **fields: Any) -> Body:
    return body("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields}, about)


def _call(arguments: str) -> Body:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    return body("/v1/chat/completions", {"messages": messages}, "arguments", _SERVED)


def _complete(about: str, **fields: Any) -> Body:
    return body("/v1/completions", {"prompt": "x", **fields}, about)


def direct(about: str, served: bool = False, **tensors: Any) -> Body:
    """A request over a gRPC stream of Triton's own."""

    def send(fleet: Fleet, replica: Replica) -> str | None:
        ask = Ask("hostile", "grpc", {"text_input": "x", **tensors}, timeout_s=_IN_TIME_S / 2)
        outcome = perform(fleet, ask, str(replica.number))
        if outcome.lost:
            return "it has no end"
        if outcome.error is None:
            return None if served else "it is served"
        if "ran past its timeout" in outcome.error:  # as when the engine starts: no harm to others
            return None
        problem = judged(400, outcome.error, frozenset({400}))
        return problem or (None if about in outcome.error else f"{outcome.error[:300]} says nothing of {about}")

    return send


def _words() -> list[str]:
    """12 MB, of fewer texts than refuse a body before anybody reads the field."""
    return [f"word {n} " * 8 for n in range(120_000)]


def _tools() -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(30)}}
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(300)]


_SERVED = frozenset(REFUSALS | {200})
# Masks take longer with each token, 0.4 s behind 32 of them.
_AMBIGUOUS: dict[str, Any] = {
    "structured_outputs": {"grammar": "start: s\ns: s? s? s? s? s? s? s? s? | /[a-z ]/"},
    "max_tokens": 100,
    "ignore_eos": True,
}
_TOGETHER = " & ".join(f"/(.*[ab].{{{n}}}[cd].*)*/" for n in range(30))

BODIES: dict[str, Body] = {
    "deep-arguments": _call("[" * 5000),
    "bad-words": _complete("bad_words", bad_words=_words, n=4, max_tokens=64),
    "allowed-ids": _complete("allowed_token_ids", allowed_token_ids=lambda: list(range(640)) * 3200),
    "spinning-template": _chat("template", chat_template_kwargs={"spin": 5000}),
    "template-overflow": _chat("template", chat_template_kwargs={"spin": 10**30}),
    "only-stops-allowed": direct(
        "min_tokens", sampling={"min_tokens": 2, "max_tokens": 4, "allowed_token_ids": [0, 2]}
    ),
    "huge-bias": direct("logit_bias", sampling={"max_tokens": 2, "logit_bias": {"1": 1e308}}),
    "ambiguous-grammar": body("/v1/completions", {"prompt": "x", **_AMBIGUOUS}, "grammar", _SERVED),
    "many-expressions": _complete("at most", structured_outputs={"grammar": f"start: A\nA: {_TOGETHER}"}),
    "schemas-of-tools": _chat("too large", tools=_tools, tool_choice="required"),
    "deep-json": _complete("JSON", stop=lambda: json.loads("[" * 500 + "]" * 500)),
    "long-name": body("/v1/completions", {"model": "m" * 100_000, "prompt": "x"}, "model", frozenset({400, 404})),
    "long-field": body("/v1/completions", {"prompt": "x", "f" * 100_000: 1}, "argument", _SERVED),
    "negative-ids": _complete("prompt", prompt=[-1]),
    "huge-n": _complete("n", n=10**9),
    "long-header": endless_header(1 << 20),
    "raw-empty-shape": raw_shape([2**62]),
    "raw-negative-shape": raw_shape([-5]),
    "raw-short-content": raw_shape([1000], b"\0\0\0\0"),
}
