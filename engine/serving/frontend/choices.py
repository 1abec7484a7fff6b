"""The answers of one request that asks for several: `n` of them, chosen from `best_of`.

Each is a request of its own to the engine, with a seed of its own, but for those of a beam search, which are one; they
share their prompt's blocks. Clients of
vllm_backend get them as one response whose outputs have an entry an answer; those of TensorRT-LLM, who ask by
`num_return_sequences`, as responses of their own with `sequence_index`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.serving.frontend.metrics import Figures
from engine.serving.frontend.stream import Piece, Stream
from engine.types import FinishReason


class Taken(msgspec.Struct, frozen=True):
    """What is to be done for a request now.

    answers: the responses to send, each a piece a stream. stop: streams that the engine is to end. finished: streams
    that have ended by themselves. reason: set when the request is over, with the last response.
    """

    answers: list[list[tuple[Stream, Piece]]]
    stop: list[Stream]
    finished: list[Stream]
    reason: FinishReason | None


class Choices:
    """The streams of one request. They have one `sending` and one `ending`; whoever holds `sending` owns the rest."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        first = streams[0]
        self.streams = streams
        self._last: list[Piece | None] = [None] * len(streams)
        for index, stream in enumerate(streams):
            stream.choices, stream.index, stream.siblings = self, index, streams
            stream.sending, stream.ending = first.sending, first.ending

    @property
    def open(self) -> list[Stream]:
        return [stream for stream, last in zip(self.streams, self._last, strict=True) if last is None]

    def take(self) -> Taken:
        """What came for the answers since the last call, as one response or several. An error of one ends all."""
        request = self.streams[0].request
        stop: list[Stream] = []
        finished: list[Stream] = []
        news: dict[int, Piece] = {}
        for index, stream in enumerate(self.streams):
            if self._last[index] is not None:
                continue
            piece, stop_engine = stream.take()
            if stop_engine:
                stop.append(stream)
            if piece is None:
                continue
            if piece.error is not None:
                rest = [other for other in self.open if other is not stream]
                return Taken([[(stream, piece)]], [*stop, *rest], [*finished, stream], piece.finish_reason)
            news[index] = piece
            if piece.finish_reason is not None:
                self._last[index] = piece
                finished.append(stream)
        reason = None if self.open else self._reason()
        if not news or not (request.stream or reason):
            return Taken([], stop, finished, None)
        if not request.stream:
            answers = self._chosen()
        elif request.separate:
            answers = [[(self.streams[index], piece)] for index, piece in news.items()]
        else:
            answers = [[(stream, news.get(i) or self._silent(i)) for i, stream in enumerate(self.streams)]]
        return Taken(answers, stop, finished, reason)

    def figures(self) -> Figures | None:
        """What the request took, for the metrics; None when it gave no token."""
        heard = [stream for stream in self.streams if stream.received]
        if not heard:
            return None
        counts = [len(stream.received) for stream in heard]
        first = heard[0].figures()
        assert first is not None
        decode_s = max(s.heard for s in heard) - min(s.first_heard for s in heard)
        return msgspec.structs.replace(
            first, decode_s=decode_s, num_generated=sum(counts), num_longest=max(counts), n=first.n
        )

    def _reason(self) -> FinishReason | None:
        reasons = {piece.finish_reason for piece in self._last if piece is not None}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    def _silent(self, index: int) -> Piece:
        """The part of a response of an answer that has nothing new; one that has ended says so again, as vLLM's do."""
        last = self._last[index]
        if last is None:
            return Piece(cumulative_logprob=self.streams[index].cumulative_logprob)
        return Piece(cumulative_logprob=last.cumulative_logprob, finish_reason=last.finish_reason)

    def _chosen(self) -> list[list[tuple[Stream, Piece]]]:
        """The n answers with the highest mean log-probability, likeliest first where there are more; as they were asked
        for otherwise. Those of a beam search come in their order."""
        request = self.streams[0].request
        found = [(stream, piece) for stream, piece in zip(self.streams, self._last, strict=True) if piece is not None]
        if len(found) > request.n and request.params.beam_width == 1:
            found.sort(key=lambda pair: pair[1].cumulative_logprob / max(1, len(pair[1].token_ids)), reverse=True)
        found = found[: request.n]
        return [[pair] for pair in found] if request.separate else [found]


def take(stream: Stream) -> Taken:
    """What is to be done for the request that `stream` belongs to. Called by the holder of `sending` only."""
    return take_alone(stream) if stream.choices is None else stream.choices.take()


def take_alone(stream: Stream) -> Taken:
    """Of a stream that is its prompt's only answer."""
    piece, stop_engine = stream.take()
    stop = [stream] if stop_engine else []
    if piece is None:
        return Taken([], stop, [], None)
    return Taken([[(stream, piece)]], stop, [], piece.finish_reason)
