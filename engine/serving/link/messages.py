"""What frontends and the engine process say to each other, as msgpack over the link."""

from __future__ import annotations

from array import array

import msgspec

from engine.types import RequestInput, TokenEvent

NOBODY = ""  # runs: what there is has not all been sent yet


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A frontend is there: the first thing it says. When its connection ends its requests are aborted."""

    frontend: str


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request. The ids of its prompt travel as the bytes of an array: thousands of integers one by one take a
    millisecond to pack, unpack and pass on. suspect: engines have died while they ran it."""

    frontend: str
    request: RequestInput  # its prompt_ids are empty
    prompt: bytes
    suspect: bool = False

    @classmethod
    def of(cls, frontend: str, request: RequestInput, suspect: bool = False) -> Submit:
        """Raises OverflowError for a token id that is no 32-bit integer."""
        prompt = array("i", request.prompt_ids).tobytes()
        return cls(frontend, msgspec.structs.replace(request, prompt_ids=()), prompt, suspect)

    def whole(self) -> RequestInput:
        """The request as it was submitted."""
        return msgspec.structs.replace(self.request, prompt_ids=array("i", self.prompt))


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests and free what they hold; unknown ids are fine (they have just ended)."""

    request_ids: list[str]


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """After `Ready`: the frontend has sent every request that it had."""

    frontend: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    frontend: str


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Empty the prefix cache, and say so. number: the frontend's own for what it asks."""

    frontend: str
    number: int


ToEngine = Hello | Submit | Sent | Abort | Bye | Reset


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests. context: tokens that one request may hold, prompt and answer."""

    context: int = 0


class Events(msgspec.Struct, frozen=True, tag="events"):
    """What one step gave the requests of one frontend."""

    events: list[TokenEvent]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """State of the engine, a few times a second; also the sign that it lives. Totals only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    cache_dtype: str = "auto"  # or "fp8"
    frontends: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    late_compiles: int = 0
    frontends_lost: int = 0
    step_counts: tuple[int, ...] = ()  # steps by bucket of their tokens (STEP_TOKENS_BUCKETS, and beyond)
    step_tokens: tuple[int, ...] = ()  # their tokens, added up
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()  # the same by the draft's place in its line


class Alone(msgspec.Struct, frozen=True, tag="alone"):
    """Which request the engine runs from now on, NOBODY while none runs and None while all do: the death of the
    engine is that one's matter. After `Ready` it runs none."""

    request_id: str | None


class WasReset(msgspec.Struct, frozen=True, tag="was_reset"):
    """Requests that are submitted from now on find nothing of what was in the prefix cache."""

    number: int


ToFrontend = Ready | Events | Stats | Alone | WasReset


LOADED = "loaded"  # the stage of the last progress report of a start, whether it succeeded or not


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a model's start has come: `done` of `total` in `unit`s. total 0: not known."""

    model: str
    stage: str
    done: int
    total: int
    unit: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_progress = msgspec.msgpack.Decoder(Progress).decode
