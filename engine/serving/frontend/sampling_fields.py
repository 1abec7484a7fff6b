"""Sampling parameters from what a client sent: JSON, flat request parameters, tensors. Consume or refuse."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.serving.frontend import constraint_fields
from engine.serving.link import messages
from engine.serving.link.protocol import LORA_REFUSAL
from engine.types import MAX_ANSWERS, MAX_BEAMS, MAX_STOP_STRINGS, ErrorCode, RequestError, SamplingParams, shown

_ALIASES = {"max_completion_tokens": "max_tokens"}  # the newer name, which wins where both are sent

# Known fields of other servers: the values that change nothing here, and the sentence for any other value.
_NOT_IMPLEMENTED: dict[str, tuple[tuple[object, ...], str]] = {
    "lora_name": ((), LORA_REFUSAL),
    "detokenize": ((True,), "detokenize=false is not implemented: read the token_ids output and ignore the text"),
    "spaces_between_special_tokens": ((True,), "spaces_between_special_tokens=false is not implemented: leave it out"),
    "truncate_prompt_tokens": ((), "truncate_prompt_tokens is not implemented: shorten the prompt before sending it"),
    "logits_processors": (((),), "logits_processors are not implemented: use logit_bias or allowed_token_ids"),
}

_ANSWERS = ("n", "best_of")
_BY_BEAMS = "use_beam_search"
_FIELDS = frozenset(field.name for field in msgspec.structs.fields(SamplingParams))
_TEXTS = ("stop", "bad_words")
_WORDS = (*_TEXTS, "cache_salt")  # in which "none" is a word like any other
_IDS = ("stop_token_ids", "allowed_token_ids")
MAX_BYTES = 2 << 20  # of one request's fields: all strings and ids that are allowed, written at their longest
_OFF = {"top_k": -1, "seed": -1}  # vLLM's and TensorRT-LLM's ways to say "not set"


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in the `sampling_parameters` tensor. Raises RequestError."""
    check_size("sampling_parameters", len(raw))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"sampling_parameters is not valid UTF-8 at byte {error.start}") from None
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"sampling_parameters must be a JSON object, not {type(value).__name__}")
    return value


def check_size(name: str, num_bytes: int) -> None:
    """Raises RequestError when fields come in more bytes than any that are allowed need."""
    if num_bytes > MAX_BYTES:
        raise RequestError(f"{name}: {num_bytes} bytes are too many; at most {MAX_BYTES} are allowed")


def build(fields: Mapping[str, Any]) -> SamplingParams:
    """Validated parameters from named values; values may be strings. Raises RequestError with the field's name, and for
    what no message to the engine holds: one that comes to an engine later, when it starts again, has no client to
    tell."""
    try:
        params = _built(fields)
        messages.encode(params)
    except OverflowError:
        sentence = "a number in the request is out of range: token ids are 32-bit, priority is 64-bit"
        raise RequestError(sentence) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        sentence = f"sampling_parameters: a text holds {half!r}, which is half of a character: send whole ones"
        raise RequestError(sentence) from None
    return params


def _built(fields: Mapping[str, Any]) -> SamplingParams:
    known: dict[str, Any] = {}
    constraint, fields = constraint_fields.taken(fields)
    renamed = {_ALIASES[given] for given, value in fields.items() if given in _ALIASES and value is not None}
    for given, value in fields.items():
        if given in renamed:
            continue
        name = field_of(given)
        if value is None or (name not in _WORDS and _word(value) in ("none", "null")):
            continue
        if name in _ANSWERS or name == _BY_BEAMS:
            continue
        if name in _NOT_IMPLEMENTED:
            _check_neutral(name, value)
            continue
        if name not in _FIELDS:
            raise RequestError(unknown_field(given))
        if name in _OFF and _word(value) == str(_OFF[name]):
            continue
        if name in _TEXTS:
            value = _strings(name, value)
        elif name == "speculation" and isinstance(value, str):
            value = parse_json(value.encode())
        elif name in _IDS and isinstance(value, list | tuple):
            value = _without_repeats(value)
        known[name] = value
    if by_beams(fields):
        # vLLM's way to ask for as many beams as answers; one beam is greedy.
        width = answers(fields)[1]
        known |= {"beam_width": width} if width > 1 else {"temperature": 0.0}
    try:
        params = msgspec.convert(known, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_parameters: {_sentence(str(error), known)}") from None
    try:
        return params if constraint is None else msgspec.structs.replace(params, structured_outputs=constraint)
    except ValueError as error:  # what the struct says itself of fields beside each other
        raise RequestError(f"sampling_parameters: {error}") from None


def answers(fields: Mapping[str, Any]) -> tuple[int, int]:
    """(n, best_of) of named values: how many answers come back, of how many they are chosen. Raises RequestError."""
    counts = {name: count for name in _ANSWERS if (count := _count(fields, name, MAX_ANSWERS)) is not None}
    width = _count(fields, "beam_width", MAX_BEAMS)
    if width is not None and width > 1:
        n = counts.get("n", width)
        if n > width:
            raise RequestError(f"beam_width ({width}) must be at least the number of answers ({n})")
        return n, width
    n = counts.get("n", 1)
    best_of = counts.get("best_of", n)
    if best_of < n:
        raise RequestError(f"best_of ({best_of}) must be at least n ({n})")
    return n, best_of


def by_beams(fields: Mapping[str, Any]) -> bool:
    """Whether vLLM's `use_beam_search` is set. Raises RequestError when it says neither."""
    word = _word(fields.get(_BY_BEAMS, False))
    if word not in ("true", "1", "false", "0", "none", "null"):
        raise RequestError(f"{_BY_BEAMS} must be true or false, not {shown(repr(fields[_BY_BEAMS]))}")
    return word in ("true", "1")


def _count(fields: Mapping[str, Any], name: str, most: int) -> int | None:
    """A number of answers; None where it is not set. Raises RequestError."""
    value = fields.get(name)
    if value is None or _word(value) in ("none", "null"):
        return None
    try:
        return msgspec.convert(value, Annotated[int, Meta(ge=1, le=most)], strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise RequestError(f"{name} must be a whole number from 1 to {most}, not {shown(repr(value))}") from None


def field_of(name: str) -> str:
    """The field of SamplingParams that a client's name stands for; the name itself where there is none."""
    return _ALIASES.get(name, name)


def _word(value: Any) -> str:
    """A single value as text; nothing of a list or an object."""
    return "" if isinstance(value, list | tuple | dict) else str(value).strip().lower()


def _without_repeats(ids: list[Any] | tuple[Any, ...]) -> list[Any]:
    """An id counts once, however often it is sent."""
    return list(dict.fromkeys(ids)) if all(isinstance(i, int | str) for i in ids) else list(ids)


def unknown_field(name: str) -> str:
    name = shown(name)
    close = difflib.get_close_matches(name, _FIELDS | constraint_fields.NAMES, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted({*_FIELDS, *_ANSWERS}))}"
    return f"unknown sampling parameter {name!r}{hint}"


def _strings(name: str, value: Any) -> list[str]:
    """`stop` and `bad_words` may be one string or a list. An empty stop string is refused in vLLM's words; an empty bad
    word says nothing."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or any(not isinstance(v, str) for v in values):
        raise RequestError(f"{name} must be a string or a list of strings")
    check_count(name, len(values))
    if name == "stop" and "" in values:
        raise RequestError("stop cannot contain an empty string.")
    return [v for v in dict.fromkeys(values) if v]


def check_count(name: str, count: int) -> None:
    """Raises RequestError when a list of strings is too long."""
    if count > MAX_STOP_STRINGS:
        raise RequestError(f"{name} holds {count} strings; at most {MAX_STOP_STRINGS} are allowed")


def _check_neutral(name: str, value: Any) -> None:
    neutral, sentence = _NOT_IMPLEMENTED[name]
    text = str(value).strip().lower()
    if any(text in (str(v).lower(), str(float(v)).lower() if isinstance(v, int | float) else "") for v in neutral):
        return
    if () in neutral and isinstance(value, list | tuple) and not value:
        return
    raise RequestError(sentence, ErrorCode.INVALID_ARG if name == "lora_name" else ErrorCode.UNSUPPORTED)


def _sentence(error: str, known: Mapping[str, Any]) -> str:
    """msgspec's "Expected `float` <= 1.0 - at `$.top_p`" with the field first and the value last."""
    match = re.fullmatch(r"(?P<what>.*?) - at `(?:key in )?\$\.(?P<path>[^`]*)`", error)
    if match is None:
        return error
    field = re.split(r"[.\[]", match["path"])[0]
    what = match["what"].replace("`", "")
    return f"{shown(match['path'])}: {what[0].lower()}{what[1:]}, got {shown(repr(known.get(field)))}"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
