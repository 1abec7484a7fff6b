"""GBNF, a notation of context-free grammars (`name ::= "text" [a-z]* (a | b){2,3}`), as Lark's.

Rules that lead to no recursion become terminals, in which any way to read a text counts: of what stands in others
llguidance takes the longest text that each terminal matches.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.structured.lark_rules import quoted
from engine.types import shown

MAX_DEPTH = 100
ROOT = "root"
_IS_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[\w-]+")
_COUNT = re.compile(r"([*+?])|\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_SIGNS = {"*": "*", "+": "+", "?": "?"}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX = {"x": 2, "u": 4, "U": 8}


def is_gbnf(text: str) -> bool:
    return "::=" in text and _IS_LARK.search(text) is None


def to_lark(text: str) -> str:
    """Raises ValueError for what is no grammar, with the place."""
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise ValueError(f"it has no rule {ROOT!r} to begin with")
    used, recursive = _reached(rules)
    names = {name: f"r{i}" if name in recursive else f"T{i}" for i, name in enumerate(used)}
    lines = [f"{names[name]}: {rules[name].written(names)}" for name in used]
    return "\n".join([f"start: {names[ROOT]}", *lines])


@dataclass(frozen=True, slots=True)
class _Rule:
    """parts: Lark's text, and the names of rules between."""

    parts: list[str | _Name]

    def written(self, names: dict[str, str]) -> str:
        return " ".join(names[part.name] if isinstance(part, _Name) else part for part in self.parts)

    @property
    def names(self) -> Iterator[str]:
        return (part.name for part in self.parts if isinstance(part, _Name))


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


def _reached(rules: dict[str, _Rule]) -> tuple[list[str], set[str]]:
    """Rules that the root leads to, and those of them that lead to one that leads to itself."""
    used, named_by = [ROOT], defaultdict[str, list[str]](list)
    for name in used:
        for each in dict.fromkeys(rules[name].names):
            if each not in rules:
                raise ValueError(f"the rule {shown(repr(each))} is not defined")
            if each not in named_by and each != ROOT:
                used.append(each)
            named_by[each].append(name)
    # A rule is regular once all that it names are.
    waits_for = {name: len(set(rules[name].names)) for name in used}
    regular = [name for name in used if not waits_for[name]]
    for name in regular:
        for other in named_by[name]:
            waits_for[other] -= 1
            if not waits_for[other]:
                regular.append(other)
    return used, {name for name in used if waits_for[name]}


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Rule]:
        made: dict[str, _Rule] = {}
        self._pass(_SPACE)
        while self._at < len(self._text):
            name = self._rule_name() or self._fail("a rule begins with its name and ::=")
            if name in made:
                self._fail(f"the rule {shown(repr(name))} is defined twice")
            made[name] = _Rule(self._alternatives(0))
            if self._at < len(self._text) and self._rule_name(look=True) is None:
                self._fail("here stands what is no part of a rule")
        return made

    def _alternatives(self, depth: int) -> list[str | _Name]:
        if depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        made = self._sequence(depth)
        while self._take("|"):
            made += ["|", *self._sequence(depth)]
        return made

    def _sequence(self, depth: int) -> list[str | _Name]:
        made: list[str | _Name] = []
        while (item := self._item(depth)) is not None:
            made += item
            if (count := self._pass(_COUNT)) is not None:
                made += [self._repeated(count)]
                self._pass(_SPACE)
        return made or ['""']

    def _item(self, depth: int) -> list[str | _Name] | None:
        if self._take('"', space=False):
            return self._literal()
        if self._take("[", space=False):
            return [self._class()]
        if self._take("."):
            return ["/(?s:.)/"]
        if self._take("("):
            made = self._alternatives(depth + 1)
            if not self._take(")"):
                self._fail("a group is not closed")
            return ["(", *made, ")"]
        if self._rule_name(look=True) is not None or (name := self._pass(_NAME)) is None:
            return None
        self._pass(_SPACE)
        return [_Name(name[0])]

    def _repeated(self, count: re.Match[str]) -> str:
        if count[1]:
            return _SIGNS[count[1]]
        low, comma, high = count[2], count[3], count[4]
        if not (low or high) or (high and not comma) or (low and high and int(low) > int(high)):
            self._fail("a count is {n}, {n,}, {,m} or {n,m}")
        return f"{{{int(low or 0)},{high}}}" if comma else f"{{{int(low)}}}"

    def _literal(self) -> list[str | _Name]:
        chars = []
        while not self._take('"'):
            chars.append(self._char())
        return [quoted("".join(chars))]

    def _class(self) -> str:
        """A class by code points, which no mark of a regular expression is among."""
        negated = self._take("^", space=False)
        ranges = []
        while not self._take("]"):
            low = high = self._char()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._char()
            if low > high:
                self._fail("a range goes upwards")
            ranges.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
        if not ranges:
            return "/(?s:.)/" if negated else self._fail("a class holds something")
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _char(self) -> str:
        char = self._text[self._at : self._at + 1] or self._fail("a text or class is not closed")
        self._at += 1
        if char != "\\":
            return char
        kind = self._text[self._at : self._at + 1] or self._fail("a text or class is not closed")
        self._at += 1
        if kind not in _HEX:
            return _ESCAPES.get(kind, kind) if not kind.isalnum() or kind in _ESCAPES else self._fail("no such escape")
        digits = self._text[self._at : self._at + _HEX[kind]]
        self._at += len(digits)
        if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
            self._fail(f"\\{kind} takes {_HEX[kind]} hexadecimal digits")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail(f"\\{kind}{digits} is no character")
        return chr(code)

    def _rule_name(self, look: bool = False) -> str | None:
        """The name in front of a `::=`. look: stay there."""
        begun = self._at
        name = self._pass(_NAME)
        self._pass(_SPACE)
        found = name is not None and self._take("::=")
        if look or not found:
            self._at = begun
        return name[0] if name is not None and found else None

    def _take(self, mark: str, space: bool = True) -> bool:
        """space: pass over what stands behind it and says nothing."""
        found = self._text.startswith(mark, self._at)
        if found:
            self._at += len(mark)
            if space:
                self._pass(_SPACE)
        return found

    def _pass(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _fail(self, why: str) -> str:
        line = self._text.count("\n", 0, self._at) + 1
        behind = self._text[max(0, self._at - 20) : self._at]
        raise ValueError(f"line {line}, behind {shown(repr(behind))}: {why}")
