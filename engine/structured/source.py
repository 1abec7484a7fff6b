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

_THINK = "<think>"
_END = "</think>"


def grammar(constraint: Constraint, special: dict[str, int]) -> str:
    """The grammar of a whole answer, thinking included. special: the tokenizer's special tokens by their text.

    Raises RequestError for what is no schema, no expression or no list, and for what is out of bounds.
    """
    try:
        made = _MAKERS[constraint.kind](constraint)
    except (ValueError, RecursionError, OverflowError) as error:
        raise RequestError(f"structured_outputs: this {constraint.kind} cannot be read: {error}") from None
    return made if constraint.think == "none" else _after_thinking(made, constraint.think == "may", special)


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


def _after_thinking(made: str, may: bool, special: dict[str, int]) -> str:
    """The grammar behind a part that is free up to the tag which closes it, and white space."""
    if made.lstrip().startswith("{"):
        (answer,) = json.loads(made)["grammars"]
    else:
        answer = {"lark_grammar": made}
    opening = _THINK if _THINK in special else json.dumps(_THINK)
    if _END in special:
        free = f"free: /(?s:.*)/ {_END}"
    else:
        free = f"free[suffix={json.dumps(_END)}]: /(?s:.*)/"
    start = f"({opening} free /\\s*/)? @answer" if may else "free /\\s*/ @answer"
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}\n{free}"}, {**answer, "name": "answer"}]})
