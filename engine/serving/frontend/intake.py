"""Triton's requests to streams: decoded, checked and put into the table, then tokenized and sent to the engine."""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from engine.serving.frontend import batch, choices, request_tensors
from engine.serving.frontend.request_tensors import LlmRequest
from engine.serving.frontend.resets import MAX_OPEN, Resets
from engine.serving.frontend.responses import Responses, unexpected
from engine.serving.frontend.sender import Sender
from engine.serving.frontend.settings import FrontendConfig
from engine.serving.frontend.stream import Stream, now
from engine.serving.frontend.stream_table import StreamTable
from engine.serving.link import protocol
from engine.text import LARGE_TEXT, Tokenizer
from engine.types import SEED_BITS, ErrorCode, FinishReason, RequestError, derive_seed

if TYPE_CHECKING:
    from engine.serving.frontend.spans import EngineSpans

logger = logging.getLogger("nereid.frontend")

_THREADS = 2
_SHORT_TEXT = 4096  # bytes that are tokenized within a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class Served:
    """How the model is served, which no request changes.

    name: of this frontend. decoupled: whether a request may have several responses. batched: tensors have a batch
    dimension, of prompts, and the ensemble's names. about: what the model says of itself besides what it can hold.
    min_tokens: no answer is shorter, unless its request allows no more.
    """

    name: str
    tokenizer: Tokenizer
    decoupled: bool = True
    batched: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 0


class Intake:
    """Its threads tokenize what `submit` has decoded and checked; texts of megabytes, which take seconds each, have one
    of their own. It has no lock.

    wake: called when a stream has been put into the table. problem: says why requests would wait for the engine now.
    """

    def __init__(
        self,
        served: Served,
        config: FrontendConfig,
        table: StreamTable,
        sender: Sender,
        responses: Responses,
        resets: Resets,
        spans: EngineSpans | None,
        wake: Callable[[], None],
        problem: Callable[[], str],
    ) -> None:
        self._served = served
        self._config = config
        self._table = table
        self._sender = sender
        self._responses = responses
        self._resets = resets
        self._spans = spans
        self._wake = wake
        self._problem = problem
        self.context = 0  # tokens that the engine takes in one request
        self._serials = itertools.count(1)
        self._admitted: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._large: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(waiting,), name="nereid-intake", daemon=True)
            for waiting in (*[self._admitted] * _THREADS, self._large)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for _ in range(_THREADS):
            self._admitted.put(None)
        self._large.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def submit(self, request: Any) -> None:
        """Take a Triton request over. Returns at once; the answer goes through the request's response sender."""
        arrived, sender = now(), request.get_response_sender()
        try:
            stream = self._admit(request, sender, arrived)
        except Exception as error:
            sentence, code = _told(error)
            self._responses.send_error(
                sender, sentence, code, request_tensors.wants_error(request), request_tensors.wants_text(request)
            )
            return
        if stream is None:
            return
        text = stream.request.text
        short = (text is None or len(text) <= _SHORT_TEXT) and not self._served.batched
        if self._config.direct and self._admitted.empty() and short:
            self._take(stream)
        else:
            (self._large if text is not None and len(text) > LARGE_TEXT else self._admitted).put(stream)

    def _admit(self, request: Any, sender: Any, arrived: float) -> Stream | None:
        """A stream for a request, in the table: from here on it ends in time. None when the answer has been sent."""
        served = self._served
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if request_tensors.wants_description(tensors):
            now_so = {"max_model_len": self.context, "problem": self._problem()}
            self._responses.send_description(sender, {**now_so, **served.about})
            return None
        if request_tensors.wants_reset(tensors):
            self._reset(sender)
            return None
        outputs = frozenset(request.requested_output_names())
        if served.batched:
            outputs = frozenset(protocol.ENSEMBLE_OUTPUT_MAP[name] for name in outputs)
        parameters, timeout_us = request_tensors.parameters(request), request.timeout()
        trace = {name: parameters.pop(name) for name in protocol.TRACE_PARAMETERS if name in parameters}
        each = batch.prompts(tensors) if served.batched else [tensors]
        asked = [request_tensors.llm_request(one, parameters, outputs, timeout_us, served.batched) for one in each]
        if served.min_tokens:
            asked = [self._no_shorter(one) for one in asked]
        if not served.decoupled:
            asked = [request_tensors.as_one_response(one, len(asked)) for one in asked]
        batch.check_answers(sum(one.best_of for one in asked))
        serial = next(self._serials)
        rows = [self._answers(one, serial, at, sender, arrived) for at, one in enumerate(asked)]
        if self._spans is not None:
            rows[0][0].trace = self._spans.context_of(request, trace)
        if len(rows) > 1:
            batch.Batch(rows)
        elif len(rows[0]) > 1:
            choices.Choices(rows[0])
        self._table.add(itertools.chain(*rows))
        self._wake()
        return rows[0][0]

    def _no_shorter(self, asked: LlmRequest) -> LlmRequest:
        least = min(self._served.min_tokens, asked.params.max_tokens)
        if asked.params.min_tokens >= least:
            return asked
        return msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, min_tokens=least))

    def _reset(self, sender: Any) -> None:
        """Have the engine empty its prefix cache; one that is not there has none. Raises RequestError."""
        number = self._resets.add(sender)
        if number is None:
            raise RequestError(f"{MAX_OPEN} resets of the prefix cache are open already", ErrorCode.UNAVAILABLE)
        if not self._table.reset_prefix_cache(number):
            self._resets.done(number)

    def _answers(self, asked: LlmRequest, serial: int, at: int, sender: Any, arrived: float) -> Sequence[Stream]:
        """The streams of the answers to prompt number `at` of a request."""
        params, most_s = asked.params, self._config.request_timeout_s
        seed = random.getrandbits(SEED_BITS) if params.seed is None else params.seed
        name = f"{self._served.name}-{serial}" + (f"-{at}" if at else "")
        return [
            Stream(
                name + (f".{index}" if index else ""),
                serial,
                sender,
                asked,
                derive_seed(seed, index) if index else seed,
                min(params.timeout_s or most_s, most_s),
                self._served.tokenizer,
                arrived,
                msgspec.structs.replace(params, prompt_logprobs=None) if index else None,
            )
            for index in range(asked.best_of)
        ]

    def _run(self, waiting: queue.SimpleQueue[Stream | None]) -> None:
        while (stream := waiting.get()) is not None:
            self._take(stream)

    def _take(self, stream: Stream) -> None:
        """Tokenize, and send the request to the engine."""
        try:
            members = [stream] if stream.choices is None else stream.choices.streams
            for one in members:
                if one.index:
                    one.tokenize_as(one.siblings[0])
                else:
                    one.tokenize(self.context)
            self._table.submit(members)
        except Exception as error:
            self._sender.end(stream, *_told(error), FinishReason.REJECTED)
            return
        # While the engine computes:
        with stream.sending:
            for one in members:
                one.prepare()


def _told(error: Exception) -> tuple[str, ErrorCode]:
    """What a client hears of a failure. Called where it is handled."""
    if isinstance(error, RequestError):
        return error.message, error.code
    return unexpected(logger), ErrorCode.INTERNAL
