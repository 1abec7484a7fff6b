"""What a request is and what comes back. No torch here: frontends import this module.

Every type is a frozen msgspec struct, so the same value is validated once, crosses the link unchanged and is
cheap to encode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TokenIds = list[int]

# What one request may hold. Each candidate of n has its own copy, and each is looked at in every step.
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 4096
MAX_STOP_IDS = 128
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_BAD_WORDS_BYTES = 2048  # of all together
MAX_BAD_WORD_IDS = 1024  # tokens of all bad words together
MAX_BIASES = 1024
MAX_BIAS = 1e6  # a hundredfold of it, over the coldest temperature, is a finite float32
MAX_ALLOWED_IDS = 1024
MAX_LOGPROBS = 20
MAX_ANSWERS = 128  # n and best_of
MAX_SALT = 256  # characters
MAX_BEAMS = 16
MAX_CONSTRAINT_BYTES = 256 << 10  # a schema, a regular expression, a grammar or choices
# Tokens that an answer may be predicted to be.
MAX_PREDICTED_IDS = 1 << 17
SEED_BITS = 63


MAX_MESSAGE = 2000  # characters of a sentence that a client reads


def shown(text: str, most: int = 80) -> str:
    """`text` for a sentence: what a client sent comes back to it cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def derive_seed(seed: int, choice: int) -> int:
    """The seed of answer number `choice` of a request: its own for the first, hashed from it for the others."""
    if choice == 0:
        return seed & (2**SEED_BITS - 1)
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**SEED_BITS - 1)


class FinishReason(str, Enum):
    """Why a request ended. Each request ends exactly once."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"  # the client went away
    REJECTED = "rejected"  # could never be served; `error` says why
    ERROR = "error"  # failed while running; `error` says why


class ErrorCode(str, Enum):
    """How an error is reported over gRPC and HTTP (Triton's own codes)."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    NOT_FOUND = "NOT_FOUND"
    INTERNAL = "INTERNAL"
    CANCELLED = "CANCELLED"


class RequestError(Exception):
    """A request that cannot be served. The message is shown to the client, cut where it is very long."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_ARG) -> None:
        self.message = shown(message, MAX_MESSAGE)
        super().__init__(self.message)
        self.code = code


Tag = Annotated[str, Meta(min_length=1, max_length=64)]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the text of an answer must be: generation draws only tokens that can still lead there, and ends where the
    text is complete and cannot go on.

    text: of "json" a JSON schema, of "choice" a JSON list of strings, of "regex" a regular expression that the whole
    answer matches, of "grammar" a grammar in Lark's notation or in GBNF, of "structural_tag" xgrammar's JSON.
    Of "free" it is empty: then think_tokens is all there is to it.
    prefix: a beginning of that text which the prompt holds already.
    think: the answer may open with a part between two `tags`, which is free; "open" says that the prompt has opened it.
    think_tokens: after so many tokens that part is closed.
    whitespace: of "json", a regular expression of the white space between tokens of JSON; "" allows none.
    """

    kind: Literal["json", "choice", "regex", "grammar", "structural_tag", "free"]
    text: str = ""
    prefix: str = ""
    think: Literal["none", "may", "open"] = "none"
    tags: tuple[Tag, Tag] = ("<think>", "</think>")
    think_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    whitespace: str | None = None

    def __post_init__(self) -> None:
        for name in ("text", "prefix", "whitespace"):
            if _num_bytes(getattr(self, name) or "") > MAX_CONSTRAINT_BYTES:
                raise ValueError(f"structured_outputs: a {self.kind} may hold {MAX_CONSTRAINT_BYTES} bytes at most")
        if self.think_tokens is not None and self.think == "none":
            raise ValueError("structured_outputs: think_tokens needs think, 'may' or 'open'")
        if self.kind == "free" and (self.think_tokens is None or self.text or self.prefix):
            raise ValueError("structured_outputs: free bounds an answer's thinking by think_tokens, and nothing else")


class RequestSpeculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request's own word on speculation: it may go without, or bring the tokens that its answer may be."""

    method: Literal["none", "prediction"]
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.method == "prediction") != bool(self.token_ids):
            raise ValueError("speculation: token_ids go with the method prediction, which needs them")
        if len(self.token_ids) > MAX_PREDICTED_IDS:
            raise ValueError(
                f"speculation: token_ids holds {len(self.token_ids)} tokens; at most {MAX_PREDICTED_IDS} are allowed"
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to choose tokens and when to stop, after validation. Defaults and names are vLLM's.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` and `min_p == 0` are off.
    `seed` None means that the frontend draws one: by the time a request reaches the engine it always has a seed,
    so that it can be replayed.
    `beam_width` above 1 searches for the likeliest answers instead of drawing one; `length_penalty` and
    `early_stopping` are transformers'. `speculation` {"method": "none"}: no tokens are drafted for this request;
    {"method": "prediction", "token_ids": […]}: those are, as long as the answer goes along.
    `cache_salt`: only requests with the same one share what is in the prefix cache.
    """

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 16
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**SEED_BITS - 1)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: int = 0
    timeout_s: Annotated[float, Meta(gt=0.0)] | None = None
    structured_outputs: Constraint | None = None
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAMS)] = 1
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] = 1.0
    early_stopping: bool = False
    speculation: RequestSpeculation | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for name, most in _MAX_ITEMS.items():
            if len(getattr(self, name)) > most:
                raise ValueError(f"{name} holds {len(getattr(self, name))} values; at most {most} are allowed")
        if any(not s or _num_bytes(s) > MAX_STOP_BYTES for s in self.stop):
            raise ValueError(f"each stop string must hold between 1 and {MAX_STOP_BYTES} bytes")
        if any(not s or _num_bytes(s) > MAX_BAD_WORD_BYTES for s in self.bad_words):
            raise ValueError(f"bad_words: each must hold between 1 and {MAX_BAD_WORD_BYTES} bytes")
        if sum(map(_num_bytes, self.bad_words)) > MAX_BAD_WORDS_BYTES:
            raise ValueError(f"bad_words: all together must hold at most {MAX_BAD_WORDS_BYTES} bytes")
        if any(not abs(v) <= MAX_BIAS for v in self.logit_bias.values()):
            raise ValueError(f"logit_bias values must lie between {-MAX_BIAS:g} and {MAX_BIAS:g}")
        if not math.isfinite(self.length_penalty):
            raise ValueError("length_penalty must be a finite number")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beam_width == 1:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise ValueError(f"{name} belongs to beam search: send a beam_width above 1, or leave it out")
            return
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name] and not (name == "temperature" and self.greedy):
                raise ValueError(f"{name} cannot be combined with beam search, which compares what the model says")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """True when logits need no per-row edit before a token is chosen."""
        return (
            self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.edits
        )

    @property
    def edits(self) -> bool:
        """Whether logits are edited by lists of tokens, which the host puts together."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens)


# Beams are ranked by the model's own log-probabilities, and their text is known at the end.
_NOT_WITH_BEAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "stop",
    "bad_words",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
    "structured_outputs",
)
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)} | {"logit_bias": {}}

_MAX_ITEMS = {
    "stop_token_ids": MAX_STOP_IDS,
    "bad_words": MAX_BAD_WORDS,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED_IDS,
}


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


class RequestInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request as the engine takes it: token ids, never text.

    `prompt_ids` is a list, or an array("i") where prompts of thousands of tokens are handed on.
    `output_ids` are tokens that an earlier life of this request already delivered (the engine was restarted, or
    another replica had it): generation continues after them and they are not delivered again. Randomness is keyed
    by (seed, position), so the continuation is the one the client would have seen.
    `bad_word_ids` are the token sequences of `params.bad_words`; the tokenizer lives in the frontend.
    `answer_ids` are the ids that the answers of a beam search go by, the likeliest first, this request's own among
    them; only the likeliest comes back where they are missing.
    `want_usage`: each event says what the request has used.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    output_ids: TokenIds = []
    bad_word_ids: list[TokenIds] = []
    answer_ids: list[str] = []
    want_usage: bool = False


def check_bad_word_ids(words: Sequence[Sequence[int]]) -> None:
    """Raises RequestError when bad words have too many tokens together."""
    count = sum(map(len, words))
    if count > MAX_BAD_WORD_IDS:
        raise RequestError(
            f"bad_words: they are {count} tokens, each word at the start of a text and after a space; at most "
            f"{MAX_BAD_WORD_IDS} are allowed"
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top ones by falling probability.

    `ranks[i]` is the 1-based rank of `ids[i]` over the vocabulary.
    """

    ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a request has used so far.

    blocks: those that hold its tokens' keys and values; cached_blocks: of these, found in the prefix cache.
    draft_tokens: proposed for it and tried; accepted_tokens: of these, those that stood.
    """

    blocks: int = 0
    cached_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one request. `finish_reason` is set exactly once, on the last event.

    token_ids: the new tokens, in order (a stop token that ended the request is included).
    logprobs: one entry a token when the request asked for them.
    complete: the answer's constraint ended it, so its last token belongs to its text.
    stop_reason: the token id that stopped it, when it was one of `stop_token_ids`.
    num_cached: prompt tokens taken from the prefix cache (on the first event of a request, else 0).
    waited: on the first event the seconds in the queue, and from there to this token.
    usage: where the request asked for it.
    """

    request_id: str
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    stop_reason: int | None = None
    num_cached: int = 0
    error: str | None = None
    error_code: ErrorCode = ErrorCode.INTERNAL
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    waited: tuple[float, float] | None = None
    complete: bool = False
    usage: Usage | None = None


def rejection(request_id: str, error: RequestError) -> TokenEvent:
    """The one event of a request that the engine refused, for those who report refusals as events."""
    return TokenEvent(request_id, [], finish_reason=FinishReason.REJECTED, error=error.message, error_code=error.code)
