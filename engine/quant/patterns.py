"""Regular expressions of a checkpoint, by which modules are told, matched in a number of steps that is known before.

Python's `re` tries one way through an expression after another, which may be more than there is time for. Here all
places that a match can have come to are followed at once (K. Thompson, "Regular expression search algorithm", CACM
11(6), 1968): a set of places in a name is an integer, bit `i` for before character `i`. Whether a name begins with a
match is all that is asked, so groups capture nothing, and greedy repeats are like lazy ones.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.models.reader import ConfigError
from engine.types import shown

MAX_CHARACTERS = 1000  # of an expression
MAX_NAME = 255  # characters of a module's name that are looked at: names are the engine's, and have tens
MAX_STEPS = 30_000  # for a name, with all expressions of a configuration
MAX_DEPTH = 20  # of groups in groups
_NO_END = 1 << 30

# Python's own parser of expressions, which has no public name.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_ASCII = [chr(code) for code in range(128)]
_CATEGORIES = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda c: c.isalnum() or c == "_"}


def check(where: str, patterns: Iterable[str]) -> int:
    """The most steps that all of them take for a name.

    Raises ConfigError for what is no expression, what no set of places can follow, and for more than MAX_STEPS.
    """
    steps = 0
    for pattern in patterns:
        steps += _checked(where, pattern).steps()
        if steps > MAX_STEPS:
            raise ConfigError(
                f"{where}: {shown(pattern)!r} is one expression too many: all may take more than {MAX_STEPS} steps for "
                "a module's name. Write them with fewer repeats of groups, or write fewer of them"
            )
    return steps


def begins(pattern: str, name: str) -> bool:
    """Whether `name` begins with what `pattern` matches, as `re.match` has it. Raises ConfigError as `check` does."""
    known = _name(name[:MAX_NAME])
    return bool(_checked("a regular expression", pattern).walk(known, 1, True))


class _Name:
    """Places in a name. all: every one. edges: those between a character of a word and another."""

    def __init__(self, name: str) -> None:
        self._at: dict[str, int] = {}
        for place, character in enumerate(name):
            self._at[character] = self._at.get(character, 0) | 1 << place
        self._found: dict[frozenset[str], int] = {}
        self.length = len(name)
        self.end = 1 << len(name)
        self.all = 2 * self.end - 1
        word = sum(places for character, places in self._at.items() if _CATEGORIES["WORD"](character))
        self.edges = word ^ (word << 1)

    def before(self, among: frozenset[str]) -> int:
        """Places before a character that is `among` these."""
        found = self._found.get(among)
        if found is None:
            found = self._found[among] = sum(at for character, at in self._at.items() if character in among)
        return found


class _Node(ABC):
    """A part of an expression."""

    @abstractmethod
    def walk(self, name: _Name, places: int, forward: bool) -> int:
        """Where matches that begin at `places` end; or, not forward, where matches that end there begin."""

    @abstractmethod
    def steps(self) -> int:
        """The most characters that `walk` looks for in a name."""


@dataclass(frozen=True)
class _Character(_Node):
    among: frozenset[str]

    def walk(self, name: _Name, places: int, forward: bool) -> int:
        here = name.before(self.among)
        return (places & here) << 1 if forward else (places >> 1) & here

    def steps(self) -> int:
        return 1


@dataclass(frozen=True)
class _Edge(_Node):
    """`^`, `$`, `\\b`, `\\B`: a place and no character."""

    kind: str

    def walk(self, name: _Name, places: int, forward: bool) -> int:
        if self.kind.startswith("AT_BEGINNING"):
            return places & 1
        if self.kind.startswith("AT_END"):
            return places & name.end
        return places & (name.edges if self.kind == "AT_BOUNDARY" else ~name.edges)

    def steps(self) -> int:
        return 1


@dataclass(frozen=True)
class _Sequence(_Node):
    parts: tuple[_Node, ...]

    def walk(self, name: _Name, places: int, forward: bool) -> int:
        for part in self.parts if forward else reversed(self.parts):
            if not places:
                break
            places = part.walk(name, places, forward)
        return places

    def steps(self) -> int:
        return sum(part.steps() for part in self.parts)


@dataclass(frozen=True)
class _Either(_Node):
    parts: tuple[_Node, ...]

    def walk(self, name: _Name, places: int, forward: bool) -> int:
        found = 0
        for part in self.parts:
            found |= part.walk(name, places, forward)
        return found

    def steps(self) -> int:
        return sum(part.steps() for part in self.parts)


@dataclass(frozen=True)
class _Repeat(_Node):
    part: _Node
    least: int
    most: int

    def walk(self, name: _Name, places: int, forward: bool) -> int:
        # As often as a name has places is enough: each time every place moves, or nothing is added to them.
        for _ in range(min(self.least, MAX_NAME + 1)):
            places = self.part.walk(name, places, forward)
        if self.most == _NO_END and isinstance(self.part, _Character):
            here = name.before(self.part.among)
            if forward:
                return _run(places, here)
            length = name.length
            return _turned(_run(_turned(places, length + 1), _turned(here, length)), length + 1)
        found = new = places
        for _ in range(min(self.most - self.least, MAX_NAME + 1)):
            new = self.part.walk(name, new, forward) & ~found
            if not new:
                break
            found |= new
        return found

    def steps(self) -> int:
        run = self.most == _NO_END and isinstance(self.part, _Character)
        more = 1 if run else min(self.most - self.least, MAX_NAME + 1)
        return self.part.steps() * (min(self.least, MAX_NAME + 1) + more)


@dataclass(frozen=True)
class _Look(_Node):
    """What must be ahead of a place, or behind it; or must not be."""

    part: _Node
    ahead: bool
    wanted: bool

    def walk(self, name: _Name, places: int, forward: bool) -> int:
        found = self.part.walk(name, name.all, not self.ahead)
        return places & (found if self.wanted else ~found)

    def steps(self) -> int:
        return 1 + self.part.steps()


def _run(places: int, here: int) -> int:
    """With `places`, those that any number of characters lead to, each of which has its place in `here`: the carry of
    the sum goes through a run of them and stops behind it."""
    return places | (((places & here) + here) ^ here)


def _turned(places: int, count: int) -> int:
    """The last of `count` places first."""
    return int(f"{places:0{count}b}"[::-1], 2) if count else 0


@functools.lru_cache(maxsize=8)
def _name(name: str) -> _Name:
    return _Name(name)


@functools.lru_cache(maxsize=4096)
def _checked(where: str, pattern: str) -> _Node:
    if len(pattern) > MAX_CHARACTERS:
        raise ConfigError(
            f"{where}: a regular expression has {len(pattern)} characters; at most {MAX_CHARACTERS} are read"
        )
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: {shown(pattern)!r} is no regular expression: {error}") from None
    refusal = f"{where}: {shown(pattern)!r} has what is not implemented in expressions of modules: "
    if parsed.state.flags & ~re.UNICODE:
        raise ConfigError(f"{refusal}flags")
    return _sequence(parsed, refusal, 0)


def _sequence(parsed: Any, refusal: str, depth: int) -> _Node:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{refusal}more than {MAX_DEPTH} groups in each other")
    return _Sequence(tuple(_node(str(kind), held, refusal, depth) for kind, held in parsed))


def _node(kind: str, held: Any, refusal: str, depth: int) -> _Node:
    """A part as Python's parser gives it: its kind, and what it holds."""
    deeper = depth + 1
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _Character(_same(frozenset(c for c in _ASCII if _is_among(c, kind, held))))
    if kind == "AT":
        return _Edge(str(held))
    if kind == "BRANCH":
        return _Either(tuple(_sequence(part, refusal, deeper) for part in held[1]))
    if kind == "SUBPATTERN" and not held[1] and not held[2]:
        return _sequence(held[3], refusal, deeper)
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, part = held
        repeated = _sequence(part, refusal, deeper)
        assert isinstance(repeated, _Sequence)
        only = repeated.parts[0] if len(repeated.parts) == 1 else repeated
        return _Repeat(only, int(least), min(int(most), _NO_END))
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _Look(_sequence(held[1], refusal, deeper), held[0] > 0, kind == "ASSERT")
    raise ConfigError(f"{refusal}{kind.lower().replace('_', ' ')}")


@functools.lru_cache(maxsize=1024)
def _same(among: frozenset[str]) -> frozenset[str]:
    """One object for equal sets: to look them up compares no characters then."""
    return among


def _is_among(character: str, kind: str, held: Any) -> bool:
    if kind == "ANY":
        return character != "\n"
    if kind in ("LITERAL", "NOT_LITERAL"):
        return (ord(character) == held) is (kind == "LITERAL")
    negated = bool(held) and str(held[0][0]) == "NEGATE"
    return _is_in(character, held[negated:]) is not negated


def _is_in(character: str, items: Sequence[Any]) -> bool:
    for kind, held in items:
        if str(kind) == "CATEGORY":
            name = str(held).removeprefix("CATEGORY_")
            if _CATEGORIES[name.removeprefix("NOT_")](character) is not name.startswith("NOT_"):
                return True
        elif held == ord(character) if str(kind) == "LITERAL" else held[0] <= ord(character) <= held[1]:
            return True
    return False
