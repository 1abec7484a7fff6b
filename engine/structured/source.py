"""A constraint as a grammar in llguidance's own form, and the bounds of what it may hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.types import Constraint, RequestError, shown

MAX_DEPTH = 64
MAX_VALUES = 100_000  # of a schema: objects, arrays, strings and numbers together
MAX_CHOICES = 4096
# A step of 99,999 takes 1.3 s to compile, one of 999,983 16 s.
MAX_STEP = 10_000
# Up to this, 64-bit floats hold integers, which grammars of JSON compare as such.
EXACT = 1 << 53


def grammar(constraint: Constraint, special: dict[str, int]) -> str:
    """The grammar of a whole answer, thinking included. special: the tokenizer's special tokens by their text.

    Raises RequestError for what is no schema, no expression or no list, and for what is out of bounds.
    """
    made = _answer(constraint)
    if constraint.think == "none":
        return made
    opening, end = (_tag(tag, special) for tag in constraint.tags)
    start = f"({opening} free /\\s{{0,8}}/)? @answer" if constraint.think == "may" else "free /\\s{0,8}/ @answer"
    return _before(made, f"start: {start}\n{_free(end, constraint.tags[1])}")


def opening(constraint: Constraint, special: dict[str, int]) -> str:
    """The grammar of answers that open their thinking themselves."""
    return LLMatcher.grammar_from_lark(f"start: {_tag(constraint.tags[0], special)} /(?s:.*)/")


def thinking(constraint: Constraint, special: dict[str, int]) -> str:
    """The grammar of thinking, up to the tag that closes it."""
    first, end = (_tag(tag, special) for tag in constraint.tags)
    start = f"start: {first} free" if constraint.think == "may" else "start: free"
    return LLMatcher.grammar_from_lark(f"{start}\n{_free(end, constraint.tags[1])}")


def closing(constraint: Constraint, special: dict[str, int]) -> str:
    """The grammar of an answer whose thinking has to be closed now. Raises RequestError as `grammar` does."""
    end = _tag(constraint.tags[1], special)
    if constraint.kind == "free":
        return LLMatcher.grammar_from_lark(f"start: {end}")
    return _before(_answer(constraint), f"start: {end} /\\s{{0,8}}/ @answer")


def _answer(constraint: Constraint) -> str:
    try:
        return _MAKERS[constraint.kind](constraint)
    except (ValueError, RecursionError, OverflowError) as error:
        raise RequestError(f"structured_outputs: this {constraint.kind} cannot be read: {error}") from None


def _json(constraint: Constraint) -> str:
    schema = json.loads(constraint.text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is a JSON object, not {shown(constraint.text)}")
    _check(schema)
    options: dict[str, Any] = {}
    if constraint.whitespace is not None:
        options = {"whitespace_flexible": bool(constraint.whitespace)}
        if constraint.whitespace:
            options["whitespace_pattern"] = constraint.whitespace
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast(Any, options))


def _choice(constraint: Constraint) -> str:
    choices = json.loads(constraint.text)
    if not isinstance(choices, list) or not choices or any(not isinstance(c, str) or not c for c in choices):
        raise ValueError("choices are a list of strings, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"{len(choices)} choices are too many: at most {MAX_CHOICES} are allowed")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _regex(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_regex(constraint.text)


def _lark(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(any_to_lark(constraint.text) if "::=" in constraint.text else constraint.text)


_MAKERS = {"json": _json, "choice": _choice, "regex": _regex, "grammar": _lark}


def _check(schema: dict[str, Any]) -> None:
    for count, (depth, key, value) in enumerate(_values(schema)):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if count >= MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        if key == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
            _, digits, exponent = Decimal(str(value)).as_tuple()
            step = int("".join(map(str, digits))) * 10 ** min(max(int(exponent), 0), 20)
            if step > MAX_STEP:
                raise ValueError(f"multipleOf {shown(str(value))}: its digits may be {MAX_STEP} at most")
        if key in ("const", "enum"):
            large = (each for _, _, each in _values(value) if isinstance(each, int) and abs(each) > EXACT)
            if (found := next(large, None)) is not None:
                raise ValueError(f"{key} {shown(str(found))}: integers beyond 2^53 cannot be held to: make it a string")


def _values(schema: Any) -> Iterator[tuple[int, str, Any]]:
    """(depth, key, value) of everything within."""
    left: list[tuple[int, str, Any]] = [(1, "", schema)]
    while left:
        depth, key, value = left.pop()
        yield depth, key, value
        if isinstance(value, dict):
            left.extend((depth + 1, name, inner) for name, inner in value.items())
        elif isinstance(value, list):
            left.extend((depth + 1, "", inner) for inner in value)


def _before(answer: str, lark: str) -> str:
    """A grammar in Lark's notation that refers to `answer`, another grammar."""
    if answer.lstrip().startswith("{"):
        (made,) = json.loads(answer)["grammars"]
    else:
        made = {"lark_grammar": answer}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**made, "name": "answer"}]})


def _free(end: str, tag: str) -> str:
    """The rule of a part that is free up to the tag which closes it."""
    if end.startswith("<["):
        return f"free: /(?s:.*)/ {end}"
    return f"free[suffix={json.dumps(tag)}]: /(?s:.*)/"


def _tag(tag: str, special: dict[str, int]) -> str:
    """A tag in Lark's notation. It may be, or begin with, a special token."""
    begun = max((text for text in special if text and tag.startswith(text)), key=len, default="")
    if not begun:
        return json.dumps(tag)
    rest = tag[len(begun) :]
    return f"<[{special[begun]}]>" + (f" {json.dumps(rest)}" if rest else "")
