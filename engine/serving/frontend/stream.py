"""One request in a frontend: what came from the engine, what went out as text."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.serving.frontend.metrics import Figures
from engine.serving.frontend.request_tensors import LlmRequest
from engine.text import Detokenizer, Tokenizer
from engine.types import (
    MAX_BIAS,
    MAX_BIASES,
    ErrorCode,
    FinishReason,
    RequestError,
    RequestInput,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Usage,
    check_bad_word_ids,
)

if TYPE_CHECKING:
    from engine.serving.frontend.batch import Batch
    from engine.serving.frontend.choices import Choices

_MIN_TIMEOUT_S = 1e-3
_ENDED_BADLY = frozenset({FinishReason.CANCELLED, FinishReason.REJECTED, FinishReason.ERROR})


class Piece(msgspec.Struct, frozen=True):
    """What one response carries. `error` set: the request failed and nothing else counts."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: ErrorCode = ErrorCode.INTERNAL


class Stream:
    """A request on its way. `pending` is filled by the link's thread and drained by whoever holds `sending`; the rest
    belongs to that one, except `received`, which the link's thread keeps so that the request can be sent again.

    `ending` is held while the last response goes out, and by whoever else calls `sender`: the server frees what a
    sender stands on with the last response, and crashes on a call that comes after it.
    """

    def __init__(
        self,
        request_id: str,
        serial: int,
        sender: Any,
        request: LlmRequest,
        seed: int,
        timeout_s: float,
        tokenizer: Tokenizer,
        arrived: float,
        params: SamplingParams | None = None,
    ) -> None:
        """params: the request's own unless they are given."""
        self.request_id = request_id
        self.serial = serial
        self.sender = sender
        self.request = request
        self.prompt_ids: Sequence[int] = ()
        self.params = params or request.params
        self.arrived = arrived
        self.timeout_s = timeout_s
        self.submitted = False  # the engine has it, or the next one is to have it
        self.received: list[int] = []
        self.heard = self.first_heard = 0.0
        self.waited = (0.0, 0.0)
        self.trace: dict[str, str] = {}  # the context of the trace it belongs to
        self.deaths = 0  # of engines that ran it, since its last token
        self.ended = False
        self.ending = threading.Lock()
        self.queued = False
        self.sending = threading.Lock()  # held from `take` until what it gave is sent
        self.pending: deque[TokenEvent] = deque()
        self._seed = seed
        self._bad_word_ids: list[list[int]] = []
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self._reads_text = request.wanted.text or bool(self.params.stop)
        self._cumulative = 0.0
        self.choices: Choices | Batch | None = None  # with the other answers of its request
        self.siblings: Sequence[Stream] = (self,)  # the answers to its prompt
        self.index = 0  # among them
        self.batch_index = 0  # of its prompt
        self.num_cached = 0  # prompt tokens found in the prefix cache
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.usage = Usage()
        self._held: list[Piece] = []

    def tokenize(self, context: int) -> None:
        """Make ids of what came as text. Raises RequestError. Called once, before the request is submitted.

        context: tokens that the engine takes in one request; 0 while it is not known.
        """
        text = self.request.text
        if text is not None:
            self._tokenizer.check_length(len(text), context)
        ids = (self.request.input_ids or ()) if text is None else self._tokenizer.encode(text)
        if not ids:
            raise RequestError("the prompt has no tokens: send some text")
        self._bad_word_ids = bad_word_ids(self.params.bad_words, self._tokenizer)
        if self.request.bad_ids or self.request.stop_ids:
            self._bad_word_ids += [list(word) for word in self.request.bad_ids]
            check_bad_word_ids(self._bad_word_ids)
            self.params = self._with_words()
            self._reads_text |= bool(self.params.stop)
        self.prompt_ids = ids
        if self.request.biases:
            bias = word_biases(self.request.biases, self.params.logit_bias, self._tokenizer)
            self.params = msgspec.structs.replace(self.params, logit_bias=bias)

    def tokenize_as(self, other: Stream) -> None:
        """Take the ids that `other`, an answer of the same request, has made."""
        self.prompt_ids, self._bad_word_ids = other.prompt_ids, other._bad_word_ids
        theirs = other.params
        self.params = msgspec.structs.replace(
            self.params, logit_bias=theirs.logit_bias, stop=theirs.stop, bad_words=theirs.bad_words
        )
        self._reads_text = other._reads_text

    def _with_words(self) -> SamplingParams:
        """The parameters with the words that came as ids. What ends an answer is a text, however it is cut into tokens;
        what is banned are the ids themselves, and their text says so.

        Raises RequestError when they are too many or too long, or have no text."""
        stop, bad = (
            tuple(self._tokenizer.decode(word, skip_special_tokens=False) for word in words)
            for words in (self.request.stop_ids, self.request.bad_ids)
        )
        params = self.params
        try:
            return msgspec.structs.replace(params, stop=(*params.stop, *stop), bad_words=(*params.bad_words, *bad))
        except ValueError as error:
            raise RequestError(f"with the words of stop_words_list and bad_words_list {error}") from None

    @property
    def asks(self) -> bool:
        """Whether the engine is sent a request for it: those of a beam search come of the first one's."""
        return self.index == 0 or self.params.beam_width == 1

    @property
    def cumulative_logprob(self) -> float:
        return self._cumulative

    def prepare(self) -> None:
        """Make what the first token needs, if it is not there. Called by the holder of `sending` only."""
        if self._detokenizer is None and self._reads_text:
            params = self.params
            self._detokenizer = Detokenizer(
                self._tokenizer,
                self.prompt_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )

    def engine_request(self) -> RequestInput:
        """The request as the engine takes it; after tokens have come, the one that goes on behind them, in what is left
        of its time."""
        left = max(_MIN_TIMEOUT_S, self.timeout_s - (now() - self.arrived))
        return RequestInput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            params=msgspec.structs.replace(self.params, seed=self._seed, timeout_s=left),
            output_ids=self.received,
            bad_word_ids=self._bad_word_ids,
            answer_ids=self._beam_ids(),
            want_usage=bool(self.request.wanted.perf),
        )

    def _beam_ids(self) -> list[str]:
        return [] if self.params.beam_width == 1 else [stream.request_id for stream in self.siblings]

    def receive(self, event: TokenEvent, interval: int) -> bool:
        """Take an event; True when the sender has something to do. Called by the link's thread only.

        A streamed response waits for `interval` tokens, but for the first and the last. Without streaming only the
        end matters, unless stop strings must be looked for.
        """
        first = not self.received
        self.received.extend(event.token_ids)
        self.pending.append(event)
        if event.finish_reason is not None:
            return True
        if not self.request.stream:
            return bool(self.params.stop)
        return first or interval == 1 or len(self.received) % interval == 0

    def take(self) -> tuple[Piece | None, bool]:
        """(what to send now, whether the engine is to be told to stop). Called by the holder of `sending` only."""
        events = [self.pending.popleft() for _ in range(len(self.pending))]
        if not events:
            return None, False
        piece, stop_engine = self._merge(events)
        if self.request.stream or piece.error is not None:
            return piece, stop_engine
        self._held.append(piece)
        return (self._whole(), stop_engine) if piece.finish_reason is not None else (None, False)

    def figures(self) -> Figures | None:
        """What the request took, for the metrics; None when it gave no token."""
        if not self.received:
            return None
        num_prompt, num_generated = len(self.prompt_ids), len(self.received)
        return Figures(
            *self.waited,
            decode_s=self.heard - self.first_heard,
            num_prompt=num_prompt,
            num_computed=num_prompt - self.num_cached,
            num_generated=num_generated,
            num_longest=num_generated,
            max_tokens=self.params.max_tokens,
            n=self.request.n,
        )

    def decoded_token(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token, None for a tokenizer whose tokens have none of their own."""
        return self._tokenizer.token_bytes(token_id) if self._tokenizer.byte_exact else None

    def echo_text(self) -> str:
        """The prompt as it is put before an answer that is not streamed."""
        if not self.request.echo:
            return ""
        if self.request.text is not None:
            return self.request.text.decode("utf-8")
        return self._tokenizer.decode(self.prompt_ids)

    def _merge(self, events: Sequence[TokenEvent]) -> tuple[Piece, bool]:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for event in events:
            token_ids += event.token_ids
            logprobs += event.logprobs or ()
            self.num_cached = event.num_cached or self.num_cached
            self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
            self.usage = event.usage or self.usage
        last = events[-1]
        reason = last.finish_reason
        if reason in _ENDED_BADLY:
            sentence = last.error or f"the request ended: {reason.value}"
            code = ErrorCode.CANCELLED if reason is FinishReason.CANCELLED and last.error is None else last.error_code
            return Piece(finish_reason=reason, error=sentence, error_code=code), False
        text, used, stopped = self._read(token_ids, reason, last.complete)
        stop_engine = stopped and reason is None
        if stopped:
            reason = FinishReason.STOP
            token_ids, logprobs = token_ids[:used], logprobs[:used]
        self._cumulative += sum(entry.logprobs[0] for entry in logprobs)
        return Piece(text, token_ids, logprobs, self._cumulative, reason), stop_engine

    def _read(self, token_ids: list[int], reason: FinishReason | None, complete: bool) -> tuple[str, int, bool]:
        """(text that the tokens add, how many of them belong to the answer, whether a stop string ended it). Nothing is
        read where neither text nor stop strings were asked for."""
        self.prepare()
        if self._detokenizer is None:
            return "", len(token_ids), False
        # The token that ended the answer (end of sequence, a stop token) has no text of its own, but for one that
        # completed it.
        by_token = reason is FinishReason.STOP and not complete and not self.params.include_stop_str_in_output
        delta = self._detokenizer.push(token_ids[:-1] if by_token else token_ids)
        if delta.stop is not None or reason is None:
            return delta.text, delta.num_tokens, delta.stop is not None
        tail = self._detokenizer.finish()
        return delta.text + tail.text, len(token_ids), tail.stop is not None

    def _whole(self) -> Piece:
        """All pieces of an answer that is not streamed, as one."""
        last = self._held[-1]
        return Piece(
            text="".join([p.text for p in self._held]),
            token_ids=[i for p in self._held for i in p.token_ids],
            logprobs=[entry for p in self._held for entry in p.logprobs],
            cumulative_logprob=last.cumulative_logprob,
            finish_reason=last.finish_reason,
        )


def bad_word_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of each word as it stands at the start of a text and after a space. Raises RequestError when they
    are too long together."""
    sequences: list[list[int]] = []
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    check_bad_word_ids(sequences)
    return sequences


def word_biases(
    words: tuple[tuple[str, float], ...], known: dict[int, float], tokenizer: Tokenizer
) -> dict[int, float]:
    """`known` and, for each token of each word, its weight, added up as TensorRT-LLM does.

    Raises RequestError when these are more than logit_bias may hold."""
    bias = dict(known)
    for word, weight in words:
        for token in tokenizer.encode(word, add_special_tokens=False):
            bias[token] = bias.get(token, 0.0) + weight
    if len(bias) > MAX_BIASES or any(abs(value) > MAX_BIAS for value in bias.values()):
        raise RequestError(
            f"embedding_bias_words and logit_bias: {len(bias)} tokens together; at most {MAX_BIASES} are allowed, with "
            f"sums of up to {MAX_BIAS:g}"
        )
    return bias


def now() -> float:
    return time.monotonic()
