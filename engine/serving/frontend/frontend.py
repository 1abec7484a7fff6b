"""One frontend: requests in from Triton, tokens back from the engine, text out. No torch here.

Threads, so that none holds up another:
    intake   tokenizes what `submit` has decoded and checked, and sends it to the engine (`intake`)
    link     receives events and leaves them with their streams, here
    sender   detokenizes and sends; what came for a stream meanwhile goes out as one response (`sender`)
    watch    asks Triton which clients have gone, and ends what is past its time (`client_watch`)

The streams that are open stand in one table (`stream_table`), which has the only lock that several of them take.

A hand-over costs a tenth of a millisecond or more. While there is little to do (`direct`), Triton's thread takes a
short request in itself, and the link's sends a few responses itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.serving.frontend.client_watch import ClientWatch
from engine.serving.frontend.intake import Intake, Served
from engine.serving.frontend.metrics import Metrics
from engine.serving.frontend.resets import Resets
from engine.serving.frontend.responses import Responses
from engine.serving.frontend.sender import Sender
from engine.serving.frontend.settings import FrontendConfig
from engine.serving.frontend.stream import Stream, now
from engine.serving.frontend.stream_table import StreamTable
from engine.serving.link.engine_view import EngineView
from engine.serving.link.messages import Stats
from engine.types import ErrorCode, TokenEvent

if TYPE_CHECKING:
    from engine.serving.frontend.spans import EngineSpans

logger = logging.getLogger("nereid.frontend")

_FEW_EVENTS = 4  # a send takes about as long as a hand-over
_UNHEALTHY = "Model is unavailable due to unhealthy vLLM engine"  # vllm_backend's words
_FATAL = "the engine died {deaths} times while it ran this request, so it is not tried again"


class Frontend:
    """Everything one instance of an LLM model does, but for Triton's own calling conventions: the parts put together,
    and what the link says handed to them. The link is the table's; it is started and closed by its owner."""

    def __init__(
        self,
        served: Served,
        config: FrontendConfig,
        table: StreamTable,
        engine: EngineView,
        responses: Responses,
        metrics: Metrics,
        spans: EngineSpans | None = None,
        verbose: Callable[[str], None] = logger.debug,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = served.name
        self._config = config
        self._table = table
        self._engine = engine
        self._metrics = metrics
        self._resets = Resets(lambda sender: responses.send_description(sender, {"prefix_cache": "empty"}))
        self._sender = Sender(table, responses, metrics, spans, config.senders)
        self._watch = ClientWatch(table, self._sender, verbose, must_end)
        self._intake = Intake(
            served,
            config,
            table,
            self._sender,
            responses,
            self._resets,
            spans,
            wake=self._watch.wake,
            problem=lambda: engine.problem,
        )
        self.on_give_up: Callable[[], None] | None = None

    def start(self) -> None:
        for part in (self._intake, self._sender, self._watch):
            part.start()

    def submit(self, request: Any) -> None:
        """Take a Triton request over. Returns at once; the answer goes through the request's response sender."""
        self._intake.submit(request)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no stream is left. False when some are left after `timeout_s`."""
        return self._table.drain(timeout_s)

    def close(self, sentence: str) -> None:
        """End what is left with UNAVAILABLE and stop the threads. The link is closed by its owner, after."""
        for stream in self._table.all():
            self._sender.end(stream, sentence)
        self._resets.all_done()
        for part in (self._intake, self._watch, self._sender):
            part.close()

    # What the link says

    def on_ready(self, context: int) -> None:
        self._intake.context = context
        self._table.engine_came()

    def on_events(self, events: list[TokenEvent], pressed: bool) -> None:
        heard = now()
        direct = self._config.direct and not pressed and len(events) <= _FEW_EVENTS
        for event in events:
            stream = self._table.get(event.request_id)
            if stream is None or stream.ended:
                continue
            if event.token_ids:
                self._observe(stream, event, heard)
            if not stream.receive(event, self._config.stream_interval):
                continue
            if direct:
                self._sender.send_or_enqueue(stream)
            else:
                self._sender.enqueue(stream)

    def on_stats(self, stats: Stats) -> None:
        self._metrics.engine(stats, self._engine.leading)

    def on_reset(self, number: int) -> None:
        self._resets.done(number)

    def on_alone(self, request_id: str | None) -> None:
        self._table.engine_runs_alone(request_id)

    def on_down(self) -> None:
        for stream in self._table.engine_died():
            # Another replica would die of it too, so it is no end that a client or a router tries again.
            self._sender.end(stream, _FATAL.format(deaths=stream.deaths), ErrorCode.INTERNAL)
        self._resets.all_done()
        logger.warning("%s: the engine process died; %d requests wait for the next one", self._name, len(self._table))

    def on_failed(self, sentence: str) -> None:
        left = self._table.engine_failed(sentence)
        first = not self._engine.settled.is_set()
        self._engine.settled.set()
        if not first and self.on_give_up is not None:
            self.on_give_up()  # so that the model does not answer ready to those who hear of its end
        for stream in left:
            self._sender.end(stream, _UNHEALTHY if self._config.vllm_health_check else self._table.down(sentence))

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
