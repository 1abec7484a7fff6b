"""How many values a body may hold: a worker makes objects of them on its event loop, and answers nobody meanwhile."""

from __future__ import annotations

from clients.openai.errors import ApiError

MAX_TEXTS = 131_072  # some 0.2 s of checks; a message of a chat is five: its object, two names and two texts
MAX_VALUES = 1 << 21  # numbers are checked at once, as the ids of a prompt
_MIN_BYTES = 2  # of a value with what parts it from the next


def check_values(data: bytes) -> None:
    """`data`: the body, JSON or not. Raises ApiError 413 when it holds too many values: names, texts, lists and objects
    (MAX_TEXTS), or values of any kind (MAX_VALUES)."""
    if len(data) < _MIN_BYTES * MAX_TEXTS:
        return
    # A backslash that is escaped escapes nothing; a quote that is left then begins or ends a text.
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    texts = plain.count(b'"') // 2
    if texts <= MAX_TEXTS:
        outside = b"".join(plain.split(b'"')[::2])
        texts += outside.count(b"{") + outside.count(b"[")
        if texts <= MAX_TEXTS and outside.count(b",") < MAX_VALUES:
            return
    sentence = (
        f"The request body may hold at most {MAX_TEXTS:,} names, texts, lists and objects, and {MAX_VALUES:,} values "
        "in all: send what is longer in several requests."
    )
    raise ApiError(413, sentence, code="content_too_large")
