"""One schema held to what is promised: answers under its masks are documents that it accepts, and no token of a
document that it accepts is masked."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from engine.structured.matcher import GrammarMatcher
from engine.structured.vocabulary import Vocabulary
from engine.text import Tokenizer
from engine.types import Constraint, RequestError
from tests.schemas.generate import document, validator

MAX_TOKENS = 1500
ENDING = 6.0  # how much likelier, as a logit, tokens are that end a string, a list or an object


@dataclass
class Found:
    """Counts over schemas."""

    schemas: int = 0
    answers: int = 0
    cut: int = 0
    documents: int = 0
    slowest_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)  # an answer that cannot go on within its grammar
    wrong: list[str] = field(default_factory=list)
    masked: list[str] = field(default_factory=list)


# What refusals name, and what is told of it; the first that is found.
_NAMED = (
    ("oneOf", r"oneOf"),
    ("minProperties, maxProperties", r"(min|max)/?(max)?Properties"),
    ("{0}", r"Unimplemented keys: \[\"?([^\]\"]*)"),
    ("format {0}", r"Unknown format: (\S+)"),
    ("pattern, look-around", r"look-around"),
    ("pattern", r"regex|pattern"),
    ("$ref to another document", r"not present in a registry"),
    ("exclusiveMinimum, exclusiveMaximum", r"exclusiveM..imum .* with"),
    ("nothing satisfies it", r"[Uu]nsatisfiable"),
    ("{0}", r"(const|enum|multipleOf) \S+:"),
    ("larger than 256 KiB", r"bytes at most"),
    ("the grammar's size", r"too large|too big|limit|fuel"),
)


def keyword(sentence: str) -> str:
    """The keyword that a refusal names."""
    for named, pattern in _NAMED:
        found = re.search(pattern, sentence)
        if found is not None:
            return named.format(*found.groups())
    return sentence[:80]


class Checker:
    def __init__(self, folder: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = Vocabulary(folder, vocab_size, eos_ids)
        self._tokenizer = Tokenizer.from_folder(folder)
        self._eos = frozenset(eos_ids)
        bytes_ = [self._tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._ending = np.array([ENDING if set(b'"}]') & set(each) else 0.0 for each in bytes_])

    def check(self, name: str, schema: Any, rng: Random, found: Found, answers: int = 2, documents: int = 3) -> None:
        """Count what comes of one schema."""
        found.schemas += 1
        judge = validator(schema)
        begun = time.monotonic()
        try:
            first = self._vocabulary.compiled(Constraint(kind="json", text=json.dumps(schema)))
        except (RequestError, ValueError) as error:
            found.refused[keyword(str(error))] += 1
            return
        finally:
            found.slowest_s = max(found.slowest_s, time.monotonic() - begun)
        for i in range(answers):
            self._answer(name, first.copy(0), judge, rng, found, ENDING if i else 2 * ENDING)
        for _ in range(documents):
            self._document(name, schema, first, judge, rng, found)

    def _answer(self, name: str, matcher: GrammarMatcher, judge: Any, rng: Random, found: Found, ending: float) -> None:
        noise = np.random.default_rng(rng.getrandbits(32))
        logits = noise.normal(size=len(self._ending)) + self._ending * (ending / ENDING)
        tokens: list[int] = []
        while not matcher.ended and len(tokens) < MAX_TOKENS:
            allowed = np.flatnonzero(self._allowed(matcher))
            if matcher.error is not None:
                found.broken[matcher.error] += 1
                return
            tokens.append(int(allowed[np.argmax(logits[allowed] + noise.gumbel(size=len(allowed)))]))
            matcher.advance(tokens[-1])
        found.answers += 1
        if not matcher.ended:
            found.cut += 1
            return
        text = self._tokenizer.decode([token for token in tokens if token not in self._eos])
        try:
            error = next(judge.iter_errors(json.loads(text)), None)
            told = None if error is None else f"{error.validator}: {error.message}"
        except ValueError as failed:
            told = str(failed)
        if told is not None:
            found.wrong.append(f"{name}: {text[:200]!r}: {told[:300]}")

    def _document(self, name: str, schema: Any, first: GrammarMatcher, judge: Any, rng: Random, found: Found) -> None:
        try:
            made = document(schema, rng, schema)
            if not judge.is_valid(made):
                return
        except Exception:  # what the generator cannot follow
            return
        separators = rng.choice(((",", ":"), (", ", ": ")))
        text = json.dumps(made, ensure_ascii=False, separators=separators)
        found.documents += 1
        if (masked := self._masked(first.copy(0), text)) is not None:
            found.masked.append(f"{name}: {text[:300]}: {masked}")

    def masked(self, schema: Any, text: str) -> str | None:
        """Where a text is held back, if it is."""
        return self._masked(self._vocabulary.compiled(Constraint(kind="json", text=json.dumps(schema))), text)

    def _masked(self, matcher: GrammarMatcher, text: str) -> str | None:
        for i, token in enumerate(self._tokenizer.encode(text, add_special_tokens=False)):
            if matcher.ended or not self._allowed(matcher)[token]:
                return f"token {i}, {self._tokenizer.token_text(token)!r}"
            matcher.advance(token)
        ends = matcher.ended or any(self._allowed(matcher)[token] for token in self._eos)
        return None if ends else "its end"

    def _allowed(self, matcher: GrammarMatcher) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        (words,) = self._vocabulary.masks([matcher])
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: len(self._ending)].astype(bool)
