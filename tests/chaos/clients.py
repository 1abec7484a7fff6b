"""Ask as real clients do, over tritonclient's gRPC streams and the shim's HTTP; record how each request ended."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.chaos.fleet import LONGEST_S, Fleet
from tests.e2e.harness import infer_input

SHIM = "shim"
TIMEOUT_S = 20.0
SHORT_TIMEOUT_S = 2.0
_GIVE_UP_S = 12.0  # past its deadline, a request that has not ended is given up: it is lost
_THINK_S = 0.4
_OFTEN = 4  # the two requests with little time, beside two dozen others
_AT_ONCE = 6
_MODEL = "demo"
# A connection of its own for each request, so that one that broke is none of the next one's business.
CHANNEL = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Ask:
    """A request. way: grpc, completion or chat. fields: of the request. cut: responses after which the client leaves.
    known: whether an undisturbed run says what its tokens are."""

    name: str
    way: str
    fields: dict[str, Any] = field(hash=False)
    stream: bool = True
    cut: int | None = None
    timeout_s: float = TIMEOUT_S
    known: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a request ended. door: a replica's number, or the shim. began, ended: seconds of time.monotonic.

    ends: how many ends the client saw. tokens: of each choice. values: log-probabilities, in their order. left: the
    client went away by itself. lost: nothing came within its deadline and the time after it.
    """

    ask: Ask
    door: str
    began: float
    ended: float
    ends: int = 0
    tokens: tuple[tuple[int, ...], ...] = ()
    values: tuple[float, ...] = ()
    status: int = 200
    error: str | None = None
    left: bool = False
    lost: bool = False


PROMPTS = (
    "A server takes a question and",
    "def read(path):\n    with open(path)",
    "The queue module implements multi-producer, multi-consumer queues. " * 6,
)


def asks() -> list[Ask]:
    """Every kind of request, each with a fixed answer where it has one."""
    made = []
    for place, prompt in enumerate(PROMPTS):
        seeded = {"max_tokens": 32, "temperature": 0.9, "seed": 100 + place, "ignore_eos": True}
        greedy = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        punished = {**seeded, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_k": 40}
        grpc = {"text_input": prompt}
        made += [
            Ask(f"grpc-{place}", "grpc", {**grpc, "sampling": seeded}),
            Ask(f"grpc-long-{place}", "grpc", {**grpc, "sampling": {**seeded, "max_tokens": 100}}),
            Ask(f"grpc-penalties-{place}", "grpc", {**grpc, "sampling": punished}),
            Ask(f"grpc-logprobs-{place}", "grpc", {**grpc, "return_log_probs": True, "sampling": greedy}),
            Ask(f"grpc-whole-{place}", "grpc", {**grpc, "sampling": greedy}, stream=False),
            Ask(f"grpc-leaves-{place}", "grpc", {**grpc, "sampling": {**seeded, "max_tokens": 800}}, cut=5),
            Ask(f"sse-{place}", "completion", {"prompt": prompt, **seeded}),
            Ask(f"sse-long-{place}", "completion", {"prompt": prompt, **seeded, "max_tokens": 100}),
            Ask(f"sse-three-{place}", "completion", {"prompt": prompt, **seeded, "n": 3}),
            Ask(f"sse-leaves-{place}", "completion", {"prompt": prompt, **seeded, "max_tokens": 800}, cut=5),
            Ask(f"whole-{place}", "completion", {"prompt": prompt, **punished}, stream=False),
            Ask(f"whole-logprobs-{place}", "completion", {"prompt": prompt, **greedy, "logprobs": 2}, stream=False),
            Ask(f"chat-{place}", "chat", {"messages": [{"role": "user", "content": prompt}], **seeded}),
        ]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
    held = {"type": "json_schema", "json_schema": {"name": "held", "schema": schema}}
    drawn = {"max_tokens": 32, "temperature": 0.9, "seed": 7}
    beams = {"use_beam_search": True, "n": 3, "max_tokens": 12, "ignore_eos": True}
    regex = {"structured_outputs": {"regex": "[a-z ,.]{60,90}"}, **drawn}
    # These APIs have no deadline of a request's own but the shim's, and text in place of tokens.
    greedy = {"temperature": 0.0}
    made += [
        Ask("grpc-regex", "grpc", {"text_input": PROMPTS[0], "sampling": regex}),
        Ask("sse-schema", "completion", {"prompt": PROMPTS[0], **drawn, "n": 2, "response_format": held}),
        Ask("whole-beams", "completion", {"prompt": PROMPTS[1], **beams}, stream=False),
        Ask("response", "responses", {"input": PROMPTS[0], "max_output_tokens": 32, **greedy}, False, None, LONGEST_S),
        Ask(
            "message",
            "messages",
            {"messages": [{"role": "user", "content": PROMPTS[1]}], "max_tokens": 32, **greedy},
            False,
            None,
            LONGEST_S,
        ),
    ]
    endless = {"max_tokens": 1000, "temperature": 0.9, "seed": 1, "ignore_eos": True}
    short = {"timeout_s": SHORT_TIMEOUT_S, "known": False}
    made += [
        Ask("grpc-deadline", "grpc", {"text_input": PROMPTS[0], "sampling": endless}, **short),
        Ask("sse-deadline", "completion", {"prompt": PROMPTS[0], **endless}, **short),
    ]
    return made


def perform(fleet: Fleet, ask: Ask, door: str) -> Outcome:
    """Send the request and wait for its end, or until it is given up as lost."""
    if ask.way == "grpc":
        return _grpc(fleet.replicas[int(door)].grpc, ask, door)
    if ask.way in _TEXTS:
        return _text(fleet.shim.url, ask, door)
    return _http(fleet.shim.url, ask, door)


def undisturbed(fleet: Fleet) -> dict[str, Outcome]:
    """What each request is answered with when nothing goes wrong. Raises AssertionError when it is not answered."""
    known = [(place, _completed(ask)) for place, ask in enumerate(asks()) if ask.known]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        doors = [str(place % 2) if ask.way == "grpc" else SHIM for place, ask in known]
        outcomes = list(pool.map(lambda one, door: perform(fleet, one[1], door), known, doors))
    for outcome in outcomes:
        assert outcome.error is None, f"before the storm: {outcome}"
        assert outcome.ends == 1, f"before the storm: {outcome}"
    return {outcome.ask.name: outcome for outcome in outcomes}


def _completed(ask: Ask) -> Ask:
    """The same request without its client going away; how much is asked for changes no token."""
    if ask.cut is None:
        return ask
    few = {"max_tokens": 32}
    fields = {**ask.fields, "sampling": {**ask.fields["sampling"], **few}} if ask.way == "grpc" else ask.fields | few
    return replace(ask, cut=None, timeout_s=3 * TIMEOUT_S, fields=fields)


class Load:
    """`streams` clients, each on a thread, that send one request after the other until `stop`."""

    def __init__(self, fleet: Fleet, seed: int, streams: int) -> None:
        self._fleet = fleet
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{n}"),), name=f"client-{n}", daemon=True)
            for n in range(streams)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        """Send nothing more, wait for what is open, and return how every request ended."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self._outcomes

    def _run(self, chance: random.Random) -> None:
        kinds = asks()
        weights = [_OFTEN if ask.timeout_s == SHORT_TIMEOUT_S else 1 for ask in kinds]
        while not self._stopping.is_set():
            (ask,) = chance.choices(kinds, weights)
            door = str(chance.randrange(2)) if ask.way == "grpc" else SHIM
            outcome = perform(self._fleet, ask, door)
            with self._lock:
                self._outcomes.append(outcome)
            self._stopping.wait(chance.uniform(0, _THINK_S))


def _grpc(address: str, ask: Ask, door: str) -> Outcome:
    sampling = {**ask.fields["sampling"], "timeout_s": ask.timeout_s}
    tensors = {
        **{name: value for name, value in ask.fields.items() if name != "sampling"},
        "stream": ask.stream,
        "sampling_parameters": json.dumps(sampling),
    }
    heard: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    began = time.monotonic()
    end = began + ask.timeout_s + _GIVE_UP_S
    tokens: list[int] = []
    values: list[float] = []
    made = Outcome(ask, door, began, began)
    responses, ends = 0, 0
    with InferenceServerClient(address, channel_args=CHANNEL) as client:
        try:
            client.start_stream(lambda result, error: heard.put((result, error)))
            inputs = [infer_input(name, value) for name, value in tensors.items()]
            client.async_stream_infer(_MODEL, inputs, enable_empty_final_response=True)
            while True:
                result, error = heard.get(timeout=max(0.0, end - time.monotonic()))
                if error is not None:
                    made = replace(made, error=str(error))
                    ends += 1
                    break
                responses += 1
                _take(result, tokens, values)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    ends += 1
                    break
                if ask.cut is not None and responses >= ask.cut:
                    made = replace(made, left=True)
                    break
        except queue.Empty:
            made = replace(made, lost=True)
        except InferenceServerException as error:
            made = replace(made, error=str(error))
            ends += 1
        ended = time.monotonic()
        client.stop_stream(cancel_requests=made.left or made.lost)
    while not heard.empty() and not made.left and not made.lost:
        result, _ = heard.get()
        if result is not None:  # an error after the end is the connection's
            _take(result, tokens, values)
            ends += result.get_response().parameters["triton_final_response"].bool_param
    return replace(made, ended=ended, ends=ends, tokens=(tuple(tokens),), values=tuple(values))


def _take(result: Any, tokens: list[int], values: list[float]) -> None:
    for output in result.get_response().outputs:
        if output.name == "token_ids":
            tokens += result.as_numpy("token_ids").ravel().tolist()
        elif output.name == "output_log_probs":
            values += result.as_numpy("output_log_probs").ravel().tolist()


def _http(url: str, ask: Ask, door: str) -> Outcome:
    path = "/v1/completions" if ask.way == "completion" else "/v1/chat/completions"
    body = {"model": _MODEL, **ask.fields, "stream": ask.stream, "return_token_ids": True, "timeout": ask.timeout_s}
    began = time.monotonic()
    made = Outcome(ask, door, began, began)
    limit = ask.timeout_s + _GIVE_UP_S
    answer = _Answer(ask.fields.get("n", 1))
    try:
        with httpx.stream("POST", url + path, json=body, timeout=httpx.Timeout(limit, connect=5.0)) as response:
            made = replace(made, status=response.status_code)
            if response.status_code != 200:
                made = replace(made, error=response.read().decode(), ends=1)
            elif ask.stream:
                made = _events(response, ask, made, answer, began + limit)
            else:
                answer.add(json.loads(response.read()))
                made = replace(made, ends=answer.finished)
    except httpx.ReadTimeout:
        made = replace(made, lost=True)
    except httpx.HTTPError as error:  # the connection
        made = replace(made, error=f"{type(error).__name__}: {error}", status=0, ends=1)
    return replace(made, ended=time.monotonic(), tokens=tuple(map(tuple, answer.tokens)), values=tuple(answer.values))


def _events(response: httpx.Response, ask: Ask, made: Outcome, answer: _Answer, end: float) -> Outcome:
    responses, done = 0, 0
    error = None
    for line in response.iter_lines():
        if time.monotonic() > end:
            return replace(made, lost=True)
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done += 1
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            error = json.dumps(event)
            continue
        responses += 1
        answer.add(event)
        if ask.cut is not None and responses >= ask.cut:
            return replace(made, left=True)
    if error is None and done == 0:  # the body broke off
        return replace(made, error="the stream ended without [DONE]", status=0, ends=1)
    return replace(made, error=error, ends=answer.finished * done if error is None else done)


def _responses_text(body: dict[str, Any]) -> str:
    return "".join(part["text"] for item in body["output"] for part in item.get("content", ()))


def _messages_text(body: dict[str, Any]) -> str:
    return "".join(block["text"] for block in body["content"])


# APIs whose answers hold no tokens.
_TEXTS = {"responses": _responses_text, "messages": _messages_text}


def _text(url: str, ask: Ask, door: str) -> Outcome:
    """Characters stand for tokens."""
    began = time.monotonic()
    made = Outcome(ask, door, began, began, ends=1)
    limit = httpx.Timeout(ask.timeout_s + _GIVE_UP_S, connect=5.0)
    tokens: tuple[int, ...] = ()
    try:
        response = httpx.post(f"{url}/v1/{ask.way}", json={"model": _MODEL, **ask.fields}, timeout=limit)
        made = replace(made, status=response.status_code)
        if response.status_code == 200:
            tokens = tuple(map(ord, _TEXTS[ask.way](response.json())))
        else:
            made = replace(made, error=response.text)
    except httpx.ReadTimeout:
        made = replace(made, lost=True)
    except httpx.HTTPError as error:  # the connection
        made = replace(made, error=f"{type(error).__name__}: {error}", status=0)
    return replace(made, ended=time.monotonic(), tokens=(tokens,))


class _Answer:
    """Tokens and log-probabilities of each choice as they come."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.values: list[float] = []
        self._reasons = [0] * count

    def add(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", ()):
            self.tokens[choice["index"]] += choice.get("token_ids") or []
            self.values += (choice.get("logprobs") or {}).get("token_logprobs") or []
            self._reasons[choice["index"]] += choice.get("finish_reason") is not None

    @property
    def finished(self) -> int:
        """1 when each choice has ended once."""
        return max(self._reasons) if min(self._reasons) else 0
