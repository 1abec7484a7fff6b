"""What a measurement asks of a server, and how its figures are summed up. The same for every server and transport.

A spec is colon-separated key=value pairs:
    c=64:n=256:in=1024:out=128       closed loop, 64 requests in flight, 256 in all
    q=24:n=600:in=1024:out=128       Poisson arrivals, 24 requests a second (q=inf: all at once)
Optional: in=512-2048 (uniform lengths), out=64-256, prefix=512 (shared leading tokens), groups=4 (distinct shared
prefixes), seed=0, w=2 (requests sent before measuring). With c and q, c bounds the requests in flight.
Prompts are token ids drawn with the seed, so each server gets the same requests in the same order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clients.python.timing import percentile

WARM_SEED = 7919
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Spec:
    """One point of a measurement. Lengths are inclusive ranges of tokens; rate in requests/s (None: closed loop)."""

    text: str
    in_flight: int | None
    rate: float | None
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: int = 0
    groups: int = 1
    seed: int = 0
    warm: int = 2
    temperature: float = 0.0
    schemas: int = 0


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, the tokens to generate and when to send it (seconds after the start). sampling: fields
    that every server takes by the same names, beside those that say how many tokens there are."""

    at: float
    prompt: list[int]
    output: int
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})


@dataclass
class Answer:
    """What came back. times are seconds on the client's clock, one for each event that carried tokens."""

    prompt: int
    wanted: int
    sent: float
    ended: float
    times: list[float]
    tokens: int
    error: str | None = None
    ids: tuple[int, ...] = ()


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def parse(text: str, seed: int = 0) -> Spec:
    """A spec from its text; `seed` holds where the text names none. Raises ValueError with a sentence."""
    known = {"c", "q", "n", "in", "out", "prefix", "groups", "seed", "w", "temperature", "schemas"}
    fields: dict[str, str] = {}
    for part in text.split(":"):
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise ValueError(f"{part!r} in spec {text!r} is not one of {', '.join(sorted(known))} with a value")
        fields[key] = value
    if "c" not in fields and "q" not in fields:
        raise ValueError(f"spec {text!r} needs c= (requests in flight) or q= (requests a second)")
    in_flight = int(fields["c"]) if "c" in fields else None
    return Spec(
        text,
        in_flight,
        float(fields["q"]) if "q" in fields else None,
        int(fields.get("n", 4 * (in_flight or 50))),
        _span(fields.get("in", "1024")),
        _span(fields.get("out", "128")),
        int(fields.get("prefix", 0)),
        int(fields.get("groups", 1)),
        int(fields.get("seed", seed)),
        int(fields.get("w", 2)),
        float(fields.get("temperature", 0)),
        int(fields.get("schemas", 0)),
    )


def requests(spec: Spec, low: int, high: int, texts: Sequence[list[int]] = ()) -> list[Request]:
    """The requests of a spec, token ids in [low, high), or of `texts` in turn, whatever `in` and `prefix` are.
    Deterministic in the spec."""
    draw = random.Random(spec.seed)
    prefixes = [[draw.randrange(low, high) for _ in range(spec.prefix)] for _ in range(spec.groups)]
    made, at = [], 0.0
    for i in range(spec.requests):
        length, output = draw.randint(*spec.prompt), draw.randint(*spec.output)
        prompt = prefixes[i % spec.groups][:length]
        prompt = prompt + [draw.randrange(low, high) for _ in range(length - len(prompt))]
        if texts:
            prompt = texts[i % len(texts)]
        if spec.rate and not math.isinf(spec.rate):
            at += draw.expovariate(spec.rate)
        made.append(Request(at, prompt, output, _sampling(spec, i)))
    return made


def _sampling(spec: Spec, number: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": spec.temperature}
    if spec.temperature:
        fields["seed"] = spec.seed + number
    if spec.schemas:
        fields["structured_outputs"] = {"json": schema(number % spec.schemas)}
    return fields


def schema(number: int) -> dict[str, Any]:
    """A JSON schema unlike those of other numbers: a long list of records, of each kind of value that forms have."""
    kinds = [{"type": "integer", "minimum": 0, "maximum": 10**6}, {"type": "boolean"}, {"type": "number"}]
    kinds += [{"type": "string", "minLength": 8, "maxLength": 40}, {"enum": [f"state {number} {i}" for i in range(9)]}]
    kinds += [{"type": "string", "pattern": "^[a-z]{3,9}-[0-9]{4}$"}, {"type": "array", "items": {"type": "integer"}}]
    draw = random.Random(number)
    draw.shuffle(kinds)
    properties = {f"field_{number}_{i}": kind for i, kind in enumerate(kinds)}
    record = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 1000}


def warm_requests(spec: Spec, low: int, high: int) -> list[Request]:
    """Requests of the spec's shape that are sent before measuring; their prompts are others."""
    return requests(replace(spec, requests=spec.warm, seed=spec.seed + WARM_SEED, rate=None), low, high)


def _milliseconds(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    figures = {"mean": sum(values) / len(values), "max": max(values)}
    figures |= {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {name: round(value * 1e3, 3) for name, value in figures.items()}


def summary(spec: Spec, answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of one point, times in milliseconds.

    ttft: sent to first event with tokens. itl: gaps between such events (an event can carry several tokens).
    tpot: (last event − first event) / (tokens − 1).
    """
    good = [a for a in answers if a.error is None]
    figures: dict[str, Any] = {
        "spec": spec.text,
        "seed": spec.seed,
        "in_flight": spec.in_flight,
        "rate": spec.rate if spec.rate is None or math.isfinite(spec.rate) else "inf",
        "requests": len(answers),
        "failed": len(answers) - len(good),
    }
    for answer in answers:
        if answer.error is not None:
            figures["first_error"] = answer.error
            break
    if not good:
        return figures
    seconds = max(a.ended for a in good) - min(a.sent for a in good)
    tokens_in, tokens_out = sum(a.prompt for a in good), sum(a.tokens for a in good)
    gaps = [later - sooner for a in good for sooner, later in zip(a.times, a.times[1:], strict=False)]
    return figures | {
        "seconds": round(seconds, 4),
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "short": sum(a.tokens != a.wanted for a in good),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(tokens_out / seconds, 2),
        "total_tokens_per_s": round((tokens_in + tokens_out) / seconds, 2),
        "tokens_per_event": round(tokens_out / max(1, sum(len(a.times) for a in good)), 3),
        "ttft_ms": _milliseconds([a.times[0] - a.sent for a in good]),
        "itl_ms": _milliseconds(gaps),
        "tpot_ms": _milliseconds([(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in good if a.tokens > 1]),
        "e2e_ms": _milliseconds([a.ended - a.sent for a in good]),
    }
