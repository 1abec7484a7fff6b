"""A constraint as a grammar in llguidance's own form, and the bounds of what it may hold."""

from __future__ import annotations

import json
from typing import Any, cast

from llguidance import LLMatcher

from engine.structured import lark, schemas, tags
from engine.structured.lark_rules import SpecialTokens, check_regex
from engine.types import Constraint, RequestError, shown

MAX_CHOICES = 32_768


def grammar(constraint: Constraint, special: SpecialTokens) -> str:
    """The grammar of a whole answer, thinking included.

    Raises RequestError for what is no schema, no expression or no list, and for what is out of bounds.
    """
    made = _answer(constraint, special)
    if constraint.think == "none":
        return made
    opening, end = (_tag(tag, special) for tag in constraint.tags)
    start = f"({opening} free /\\s{{0,8}}/)? @answer" if constraint.think == "may" else "free /\\s{0,8}/ @answer"
    return _before(made, f"start: {start}\n{_free(end, constraint.tags[1])}")


def opening(constraint: Constraint, special: SpecialTokens) -> str:
    """The grammar of answers that open their thinking themselves."""
    return LLMatcher.grammar_from_lark(f"start: {_tag(constraint.tags[0], special)} /(?s:.*)/")


def thinking(constraint: Constraint, special: SpecialTokens) -> str:
    """The grammar of thinking, up to the tag that closes it."""
    first, end = (_tag(tag, special) for tag in constraint.tags)
    start = f"start: {first} free" if constraint.think == "may" else "start: free"
    return LLMatcher.grammar_from_lark(f"{start}\n{_free(end, constraint.tags[1])}")


def closing(constraint: Constraint, special: SpecialTokens) -> str:
    """The grammar of an answer whose thinking has to be closed now. Raises RequestError as `grammar` does."""
    end = _tag(constraint.tags[1], special)
    if constraint.kind == "free":
        return LLMatcher.grammar_from_lark(f"start: {end}")
    return _before(_answer(constraint, special), f"start: {end} /\\s{{0,8}}/ @answer")


def _answer(constraint: Constraint, special: SpecialTokens) -> str:
    try:
        if constraint.kind == "structural_tag":
            return tags.grammar(
                json.loads(constraint.text), special, lambda schema: _schema(schema, constraint.whitespace)
            )
        return _MAKERS[constraint.kind](constraint)
    except (ValueError, RecursionError, OverflowError) as error:
        raise RequestError(f"structured_outputs: this {constraint.kind} cannot be read: {error}") from None


def _json(constraint: Constraint) -> str:
    return _schema(json.loads(constraint.text), constraint.whitespace)


def _schema(schema: Any, whitespace: str | None) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is a JSON object, not {shown(json.dumps(schema))}")
    options: dict[str, Any] = {}
    if whitespace is not None:
        options = {"whitespace_flexible": bool(whitespace)}
        if whitespace:
            options["whitespace_pattern"] = whitespace
    return LLMatcher.grammar_from_json_schema(schemas.written(schema), overrides=cast(Any, options))


def _choice(constraint: Constraint) -> str:
    choices = json.loads(constraint.text)
    if not isinstance(choices, list) or not choices or any(not isinstance(c, str) or not c for c in choices):
        raise ValueError("choices are a list of strings, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"{len(choices)} choices are too many: at most {MAX_CHOICES} are allowed")
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _regex(constraint: Constraint) -> str:
    check_regex(constraint.text)
    return LLMatcher.grammar_from_regex(constraint.text)


def _lark(constraint: Constraint) -> str:
    return lark.grammar(constraint.text)


_MAKERS = {"json": _json, "choice": _choice, "regex": _regex, "grammar": _lark}


def _before(answer: str, text: str) -> str:
    """A grammar in Lark's notation that refers to `answer`, another grammar."""
    made, *parts = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": text}, {**made, "name": "answer"}, *parts]})


def _free(end: str, tag: str) -> str:
    """The rule of a part that is free up to the tag which closes it."""
    if end.startswith("<["):
        return f"free: /(?s:.*)/ {end}"
    return f"free[suffix={json.dumps(tag)}]: /(?s:.*)/"


def _tag(tag: str, special: SpecialTokens) -> str:
    """A tag in Lark's notation. It may be, or begin with, a special token."""
    begun = max((text for text in special.ids if text and tag.startswith(text)), key=len, default="")
    if not begun:
        return json.dumps(tag)
    rest = tag[len(begun) :]
    return f"<[{special.ids[begun]}]>" + (f" {json.dumps(rest)}" if rest else "")
