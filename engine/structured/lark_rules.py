"""Rules of one grammar in Lark's notation, while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import regex_to_lark

from engine.types import shown

MAX_GRAMMAR_BYTES = 4 << 20
MAX_OPTIONAL = 8192  # parts of an expression: compiling takes the square of them, a second for these
# Escapes, sets and marks of groups, in which nothing is optional; what is.
_OPTIONAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?|(?P<optional>[?*]|\{0?,|\|\||\(\||\|\)|\(\))", re.DOTALL)
ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """ids: a tokenizer's special tokens by their text. eos: those that end an answer."""

    ids: dict[str, int]
    eos: frozenset[int] = frozenset()

    def split(self, text: str) -> list[str | int]:
        """`text` as pieces of text and the special tokens between them, the longest where several begin."""
        known = sorted((name for name in self.ids if name and name in text), key=len, reverse=True)
        if not known:
            return [text] if text else []
        parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
        return [self.ids.get(part, part) for part in parts if part]


class Rules:
    """Rules, terminals and the grammars that they refer to. Equal ones are written once.

    Special tokens stand in grammars by their ids: text of a terminal holds none. Raises ValueError where the grammar
    grows too large.
    """

    def __init__(self, tokens: SpecialTokens) -> None:
        self.tokens = tokens
        self._lines: list[str] = []
        self._names: dict[tuple[str, ...], str] = {}
        self._grammars: list[dict[str, object]] = []
        self._size = 0

    def rule(self, body: str, options: str = "") -> str:
        return self._named(f"r{len(self._names)}", body, options)

    def terminal(self, body: str) -> str:
        return self._named(f"T{len(self._names)}", body, "")

    def later(self) -> str:
        """A name whose rule `define` gives, for rules that refer to themselves."""
        name = f"r{len(self._names)}"
        self._names[("later", name)] = name
        return name

    def define(self, name: str, body: str) -> None:
        self._add(f"{name}: {body}")

    def grammar(self, made: str) -> str:
        """A reference to another grammar, which has text of its own."""
        (inner,) = json.loads(made)["grammars"] if made.lstrip().startswith("{") else ({"lark_grammar": made},)
        name = f"part_{len(self._grammars)}"
        self._grammars.append({**inner, "name": name})
        self._grow(len(made))
        return f"@{name}"

    def literal(self, text: str) -> str:
        """A text as it stands, and its special tokens as such."""
        return " ".join(token(piece) if isinstance(piece, int) else quoted(piece) for piece in self.tokens.split(text))

    def until(self, text: str, ends: Sequence[str], without: bool = False) -> str:
        """Text of a terminal and the first of `ends` behind it; without ends the whole rest. without: the text itself
        holds none of them."""
        if not ends:
            return self.terminal(text)
        split = [self.tokens.split(end) for end in ends]
        plain = [str(pieces[0]) for pieces in split if len(pieces) == 1 and isinstance(pieces[0], str)]
        made = []
        if plain:
            if without:
                text = self.holding_none(text, plain)
            made.append(self.rule(f"{self.terminal(text)} ({' | '.join(map(quoted, plain))})", "lazy"))
        for pieces in split:
            if any(isinstance(piece, int) for piece in pieces):
                before = f" {quoted(pieces[0])}" if isinstance(pieces[0], str) else ""
                rest = pieces[1:] if before else pieces
                behind = (token(piece) if isinstance(piece, int) else quoted(piece) for piece in rest)
                made.append(" ".join([self.terminal(self.terminal(text) + before), *behind]))
        return made[0] if len(made) == 1 else f"({' | '.join(made)})"

    def holding_none(self, text: str, excluded: Sequence[str]) -> str:
        """The terminal of texts that `text` matches and that hold none of `excluded`."""
        if not excluded:
            return text
        return f"{self.terminal(text)} & ~/(?s:.*)({'|'.join(map(escaped, excluded))})(?s:.*)/"

    def beginning_with_none(self, text: str, excluded: Sequence[str]) -> str:
        return f"{self.terminal(text)} & ~/({'|'.join(map(escaped, excluded))})(?s:.*)/"

    def written(self, start: str) -> str:
        """The whole grammar, as llguidance takes it."""
        lark = "\n".join([f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def _named(self, name: str, body: str, options: str) -> str:
        known = self._names.get((name[0], body, options))
        if known is None:
            known = self._names[(name[0], body, options)] = name
            self._add(f"{name}{f'[{options}]' if options else ''}: {body}")
        return known

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._grow(len(line))

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"its grammar takes more than {MAX_GRAMMAR_BYTES} bytes: make it simpler")


def quoted(text: str) -> str:
    return json.dumps(text)


def escaped(text: str) -> str:
    """A text as a part of a regular expression in Lark's notation."""
    return re.sub(r"[^\w\s]|\n", lambda found: "\\n" if found[0] == "\n" else f"\\x{{{ord(found[0]):x}}}", text)


def check_regex(pattern: str) -> None:
    """Raises ValueError for an expression that ends within an escape, whose end llguidance leaves out, and for one of
    too many parts that may be missing."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError(f"{shown(repr(pattern))} ends with half of an escape: write \\\\ for a backslash")
    check_optional(optional_parts(pattern))


def optional_parts(pattern: str) -> int:
    """How many parts of a regular expression may be missing, as it is written."""
    return sum(found["optional"] is not None for found in _OPTIONAL.finditer(pattern))


def check_optional(count: int) -> None:
    """Raises ValueError where so many parts may be missing that compiling them takes long."""
    if count > MAX_OPTIONAL:
        raise ValueError(f"{count} of its parts may be missing (as by `?` and `*`), and at most {MAX_OPTIONAL} may")


def regex(pattern: str) -> str:
    """A regular expression as Lark's notation has it. Raises ValueError as `check_regex` does."""
    check_regex(pattern)
    return f"/{regex_to_lark(pattern, '')}/"


def token(*ids: int, but: bool = False) -> str:
    """Any of these tokens, or any but these."""
    ranges: list[list[int]] = []
    for each in sorted(ids):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"<[{'^' if but else ''}{text}]>"
