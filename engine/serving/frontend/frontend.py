"""One frontend: requests in from Triton, tokens back from the engine, text out. No torch here.

Threads, so that none holds up another:
    intakes  tokenize what `submit` has decoded and checked, and send it to the engine
    link     receives events and leaves them with their streams
    senders  detokenize and send; what came for a stream meanwhile goes out as one response
    watch    asks Triton which clients have gone, and ends what is past its time

A hand-over costs a tenth of a millisecond or more. While there is little to do (`direct`), Triton's thread takes a
short request in itself, and the link's sends a few responses itself.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from engine.serving.frontend import batch, choices, decode
from engine.serving.frontend.metrics import Metrics
from engine.serving.frontend.resets import MAX_OPEN, Resets
from engine.serving.frontend.responses import Responses, unexpected
from engine.serving.frontend.settings import FrontendConfig
from engine.serving.frontend.stream import Stream, now
from engine.serving.link import protocol
from engine.serving.link.link import Link
from engine.serving.link.messages import NOBODY, Stats
from engine.text import Tokenizer
from engine.types import SEED_BITS, ErrorCode, FinishReason, RequestError, TokenEvent, derive_seed

if TYPE_CHECKING:
    from engine.serving.frontend.spans import EngineSpans

logger = logging.getLogger("nereid.frontend")

_INTAKES = 2  # a prompt of megabytes takes one of them a second to tokenize
_SHORT_TEXT = 4096  # bytes that are tokenized within a fraction of a millisecond
_FEW_EVENTS = 4  # a send takes about as long as a hand-over
_WATCH_S = 0.02
_LATE_S = 0.3  # the engine ends a request that is past its time, unless it hangs, restarts or has not got it yet
_ASK_SHARE = 10  # of the time, at most one part in so many goes into asking
_SUSPECT_DEATHS = 2  # of engines that ran a request, without a token between: it may be what they die of
_MAX_DEATHS = 3  # the last of them while it ran alone
_FATAL = "the engine died {deaths} times while it ran this request, so it is not tried again"
_DOWN = "the engine process of model {model!r} is not there: {why}"


class Frontend:
    """Everything one instance of an LLM model does, but for Triton's own calling conventions.

    link: set by `attach` before any request comes. leading: whether this frontend writes the engine's gauges.
    decoupled: whether a request may have several responses. batched: tensors have a batch dimension, of prompts, and
    the ensemble's names. about: what the model says of itself besides what it can hold.
    """

    def __init__(
        self,
        name: str,
        model: str,
        tokenizer: Tokenizer,
        config: FrontendConfig,
        max_held: int,
        responses: Responses,
        metrics: Metrics,
        leading: Callable[[], bool],
        decoupled: bool = True,
        batched: bool = False,
        about: Mapping[str, Any] | None = None,
        spans: EngineSpans | None = None,
    ) -> None:
        self._name = name
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._max_held = max_held
        self._responses = responses
        self._metrics = metrics
        self._leading = leading
        self._decoupled = decoupled
        self._batched = batched
        self._about = dict(about or {})
        self._spans = spans
        self._resets = Resets(lambda sender: responses.send_description(sender, {"prefix_cache": "empty"}))
        self._link: Link | None = None
        self._up = False
        self._alone: str | None = NOBODY
        self._context = 0
        self.ready = threading.Event()  # an engine takes requests now
        self.served = threading.Event()  # one has, some time
        self.failed: str | None = None
        self.blamed = 0  # deaths of engines that ran one request alone
        self.settled = threading.Event()  # ready or failed
        self.on_give_up: Callable[[], None] | None = None
        self._lock = threading.Lock()  # the table of streams together with what the engine was told about it
        self._streams: dict[str, Stream] = {}
        self._serial = 0
        self._empty = threading.Condition(self._lock)
        self._intake: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._outgoing: list[queue.SimpleQueue[Stream | None]] = [queue.SimpleQueue() for _ in range(config.senders)]
        self._closing = threading.Event()
        self._busy = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"nereid-{target.__name__.strip('_')}", daemon=True)
            for target in (*[self._take_in] * _INTAKES, self._watch)
        ]
        self._threads += [
            threading.Thread(target=self._send_out, args=(outgoing,), name="nereid-sender", daemon=True)
            for outgoing in self._outgoing
        ]

    def attach(self, link: Link) -> None:
        self._link = link
        for thread in self._threads:
            thread.start()

    def submit(self, request: Any) -> None:
        """Take a Triton request over. Returns at once; the answer goes through the request's response sender."""
        arrived, sender = now(), request.get_response_sender()
        try:
            stream = self._admit(request, sender, arrived)
        except Exception as error:
            sentence, code = _told(error)
            self._responses.send_error(sender, sentence, code, decode.wants_error(request), decode.wants_text(request))
            return
        if stream is None:
            return
        text = stream.request.text
        short = (text is None or len(text) <= _SHORT_TEXT) and not self._batched
        if self._config.direct and self._intake.empty() and short:
            self._take(stream)
        else:
            self._intake.put(stream)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no stream is left. False when some are left after `timeout_s`."""
        with self._empty:
            return self._empty.wait_for(lambda: not self._streams, timeout_s)

    def close(self, sentence: str) -> None:
        """End what is left with UNAVAILABLE and stop the threads. The link is closed by its owner, before."""
        self._end_all(sentence)
        self._resets.all_done()
        self._closing.set()
        self._busy.set()
        for _ in range(_INTAKES):
            self._intake.put(None)
        for outgoing in self._outgoing:
            outgoing.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    # What the link says

    def on_ready(self, context: int) -> None:
        assert self._link is not None
        with self._lock:
            self._up = True
            self._alone = NOBODY
            self._context = context
            for stream in self._streams.values():
                if stream.submitted and stream.asks and stream.deaths < _MAX_DEATHS:
                    self._link.submit(stream.engine_request(), suspect=stream.deaths >= _SUSPECT_DEATHS)
        self.served.set()
        self.ready.set()
        self.settled.set()

    def on_events(self, events: list[TokenEvent], pressed: bool) -> None:
        heard = now()
        direct = self._config.direct and not pressed and len(events) <= _FEW_EVENTS
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None or stream.ended:
                continue
            if event.token_ids:
                self._observe(stream, event, heard)
            if not stream.receive(event, self._config.stream_interval):
                continue
            if direct and stream.choices is None and not stream.queued and stream.sending.acquire(blocking=False):
                try:
                    self._send(stream)
                finally:
                    stream.sending.release()
            else:
                self._queue(stream)

    def on_stats(self, stats: Stats) -> None:
        self._metrics.engine(stats, self._leading())

    def on_reset(self, number: int) -> None:
        self._resets.done(number)

    def on_alone(self, request_id: str | None) -> None:
        with self._lock:
            self._alone = request_id

    def on_down(self) -> None:
        """Counts the death against the requests that the engine ran: none while it started."""
        with self._lock:
            alone = self._alone
            self.blamed += self._up and alone is not None and alone != NOBODY
            for stream in self._streams.values():
                if self._up and stream.submitted and alone in (None, stream.request_id):
                    stream.deaths += 1
                    if stream.deaths >= _MAX_DEATHS:
                        # Another replica would die of it too, so it is no end that a client or a router tries again.
                        self._leave(stream, _FATAL.format(deaths=stream.deaths), ErrorCode.INTERNAL)
            self._up = False
            self.ready.clear()
            count = len(self._streams)
        self._resets.all_done()
        logger.warning("%s: the engine process died; %d requests wait for the next one", self._name, count)

    def on_failed(self, sentence: str) -> None:
        with self._lock:
            self.failed = sentence
            self._up = False
        self._end_all(_DOWN.format(model=self._model, why=sentence))
        first = not self.settled.is_set()
        self.settled.set()
        if not first and self.on_give_up is not None:
            self.on_give_up()

    # Intake

    def _admit(self, request: Any, sender: Any, arrived: float) -> Stream | None:
        """A stream for a request, in the table: from here on it ends in time. None when the answer has been sent."""
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if decode.wants_description(tensors):
            self._responses.send_description(sender, {"max_model_len": self._context, **self._about})
            return None
        if decode.wants_reset(tensors):
            self._reset(sender)
            return None
        outputs = frozenset(request.requested_output_names())
        if self._batched:
            outputs = frozenset(protocol.ENSEMBLE_OUTPUT_MAP[name] for name in outputs)
        parameters, timeout_us = decode.parameters(request), request.timeout()
        trace = {name: parameters.pop(name) for name in protocol.TRACE_PARAMETERS if name in parameters}
        each = batch.prompts(tensors) if self._batched else [tensors]
        asked = [decode.llm_request(one, parameters, outputs, timeout_us, self._batched) for one in each]
        if not self._decoupled:
            asked = [decode.as_one_response(one, len(asked)) for one in asked]
        batch.check_answers(sum(one.best_of for one in asked))
        with self._lock:
            if self.failed is not None:
                raise RequestError(_DOWN.format(model=self._model, why=self.failed), ErrorCode.UNAVAILABLE)
            if not self._up and len(self._streams) >= self._max_held:
                why = f"it is being restarted and {len(self._streams)} requests wait for it already"
                raise RequestError(_DOWN.format(model=self._model, why=why), ErrorCode.UNAVAILABLE)
            self._serial += 1
            rows = [self._answers(one, at, sender, arrived) for at, one in enumerate(asked)]
            if self._spans is not None:
                rows[0][0].trace = self._spans.context_of(request, trace)
            if len(rows) > 1:
                batch.Batch(rows)
            elif len(rows[0]) > 1:
                choices.Choices(rows[0])
            self._streams.update({stream.request_id: stream for row in rows for stream in row})
        self._busy.set()
        return rows[0][0]

    def _reset(self, sender: Any) -> None:
        """Have the engine empty its prefix cache; one that is not there has none. Raises RequestError."""
        assert self._link is not None
        with self._lock:
            number = self._resets.add(sender)
            if number is None:
                raise RequestError(f"{MAX_OPEN} resets of the prefix cache are open already", ErrorCode.UNAVAILABLE)
            up = self._up
            if up:
                self._link.reset_prefix_cache(number)
        if not up:
            self._resets.done(number)

    def _answers(self, asked: decode.LlmRequest, at: int, sender: Any, arrived: float) -> list[Stream]:
        """The streams of the answers to prompt number `at` of a request."""
        params, most_s = asked.params, self._config.request_timeout_s
        seed = random.getrandbits(SEED_BITS) if params.seed is None else params.seed
        name = f"{self._name}-{self._serial}" + (f"-{at}" if at else "")
        return [
            Stream(
                name + (f".{index}" if index else ""),
                self._serial,
                sender,
                asked,
                derive_seed(seed, index) if index else seed,
                min(params.timeout_s or most_s, most_s),
                self._tokenizer,
                arrived,
                msgspec.structs.replace(params, prompt_logprobs=None) if index else None,
            )
            for index in range(asked.best_of)
        ]

    def _take_in(self) -> None:
        while (stream := self._intake.get()) is not None:
            self._take(stream)

    def _take(self, stream: Stream) -> None:
        """Tokenize, and send the request to the engine."""
        assert self._link is not None
        try:
            members = [stream] if stream.choices is None else stream.choices.streams
            for one in members:
                if one.index:
                    one.tokenize_as(one.siblings[0])
                else:
                    one.tokenize()
            with self._lock:
                for one in members:
                    if one.request_id not in self._streams:
                        continue  # it ended meanwhile
                    one.submitted = True
                    if self._up and one.asks:
                        self._link.submit(one.engine_request())
        except Exception as error:
            self._leave(stream, *_told(error), FinishReason.REJECTED)
            return
        # While the engine computes:
        with stream.sending:
            for one in members:
                one.prepare()

    # Sending

    def _queue(self, stream: Stream) -> None:
        if not stream.queued:
            stream.queued = True
            self._outgoing[stream.serial % len(self._outgoing)].put(stream)

    def _send_out(self, outgoing: queue.SimpleQueue[Stream | None]) -> None:
        """One sender. A stream keeps to one of them, so its responses stay in order."""
        while (stream := outgoing.get()) is not None:
            stream.queued = False  # before draining: what comes from now on queues the stream again
            with stream.sending:
                self._send(stream)

    def _send(self, stream: Stream) -> None:
        """Send what came for the request of a stream. The caller holds `stream.sending`."""
        if stream.ended:
            return
        members = [stream] if stream.choices is None else stream.choices.streams
        try:
            taken = choices.take(stream)
            if taken.stop:
                self._abort([one.request_id for one in taken.stop])
            if taken.finished:
                self._drop(taken.finished if taken.reason is None else ())
            if not taken.answers:
                return
            *before, last = taken.answers
            for answer in before:
                self._responses.send(answer, False)
            if taken.reason is None:
                self._responses.send(last, False)
            else:
                figures = stream.figures() if stream.choices is None else stream.choices.figures()
                self._metrics.finished(taken.reason, now() - stream.arrived, figures)
                if self._spans is not None:
                    self._spans.finished(stream, taken.reason.value, figures)
                with stream.ending:
                    _end(members)
                    self._responses.send(last, True)
        except Exception:
            sentence = unexpected(logger)
            self._abort([one.request_id for one in members])
            wanted = stream.request.wanted
            with stream.ending:
                _end(members)
                self._responses.send_error(stream.sender, sentence, ErrorCode.INTERNAL, wanted.error, wanted.text)
        if stream.ended:
            self._drop(members)

    def _drop(self, streams: Iterable[Stream]) -> None:
        with self._empty:
            for stream in streams:
                self._streams.pop(stream.request_id, None)
            if not self._streams:
                self._empty.notify_all()

    def _abort(self, request_ids: list[str]) -> None:
        assert self._link is not None
        with self._lock:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            self._link.abort(request_ids)

    # Clients that have gone, requests that are past their time

    def _watch(self) -> None:
        asked, pause = now(), _WATCH_S
        while not self._closing.wait(_WATCH_S):
            if not self._streams:
                self._busy.clear()
                if not self._streams and not self._closing.is_set():
                    self._busy.wait()
                    continue  # whoever has just come has not gone yet, and asking takes the server's time
            began = now()
            streams = list(self._streams.values())
            for stream in [s for s in streams if began - s.arrived > s.timeout_s + _LATE_S]:
                self._give_up(stream, late(stream))
            if began - asked < pause:
                continue
            for stream in [s for s in streams if self._is_cancelled(s)]:
                self._give_up(stream, cancelled(stream.request_id))
            asked = now()
            pause = max(_WATCH_S, _ASK_SHARE * (asked - began))

    def _give_up(self, stream: Stream, event: TokenEvent) -> None:
        self._abort([stream.request_id])
        stream.pending.append(event)
        self._queue(stream)

    def _is_cancelled(self, stream: Stream) -> bool:
        with stream.ending:
            if stream.ended or (stream.choices is not None and stream.choices.open[:1] != [stream]):
                return False  # one answer of a request asks for all
            return bool(stream.sender.is_cancelled())

    # Endings

    def _end_all(self, sentence: str) -> None:
        with self._lock:
            streams = list(self._streams.values())
            for stream in streams:
                self._leave(stream, sentence)

    def _leave(
        self,
        stream: Stream,
        sentence: str,
        code: ErrorCode = ErrorCode.UNAVAILABLE,
        reason: FinishReason = FinishReason.ERROR,
    ) -> None:
        """End a stream through the sender, which forgets it."""
        stream.pending.append(TokenEvent(stream.request_id, [], finish_reason=reason, error=sentence, error_code=code))
        self._queue(stream)

    def _observe(self, stream: Stream, event: TokenEvent, heard: float) -> None:
        stream.deaths = 0
        if stream.received:
            self._metrics.next_token(heard - stream.heard)
        else:
            if not stream.index:
                self._metrics.first_token(heard - stream.arrived, len(stream.prompt_ids), event.num_cached)
            stream.first_heard, stream.waited = heard, event.waited or stream.waited
        stream.heard = heard
        self._metrics.tokens(len(event.token_ids))


def _end(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.ended = True


def cancelled(request_id: str) -> TokenEvent:
    return TokenEvent(
        request_id,
        [],
        finish_reason=FinishReason.CANCELLED,
        error="the request was cancelled by its client",
        error_code=ErrorCode.CANCELLED,
    )


def late(stream: Stream) -> TokenEvent:
    """In the engine's own words, for it could not say so."""
    sentence = (
        f"the request ran past its timeout of {stream.timeout_s:g} s with {len(stream.received)} tokens generated"
    )
    return TokenEvent(
        stream.request_id, [], finish_reason=FinishReason.ERROR, error=sentence, error_code=ErrorCode.UNAVAILABLE
    )


def _told(error: Exception) -> tuple[str, ErrorCode]:
    """What a client hears of a failure. Called where it is handled."""
    if isinstance(error, RequestError):
        return error.message, error.code
    return unexpected(logger), ErrorCode.INTERNAL
