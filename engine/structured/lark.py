"""A grammar that a client wrote, in Lark's notation or in GBNF, within the bounds that llguidance has none for."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.structured import meets, schemas
from engine.types import shown

# Texts, comments and expressions, in which nothing else stands; an intersection; a schema.
_MARKS = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<meet>&)|(?P<schema>%json\s*)',
    re.DOTALL,
)
_decode = json.JSONDecoder().raw_decode


def grammar(text: str) -> str:
    """llguidance's form of it, in which schemas are held as any other is. Raises ValueError for what cannot be
    honoured."""
    lark = any_to_lark(text) if "::=" in text else text
    parts, done, at, meeting = [], 0, 0, 0
    while (found := _MARKS.search(lark, at)) is not None:
        at = found.end()
        meeting += found["meet"] is not None
        if found["schema"] is not None:
            schema, at = _decode(lark, at)
            if not isinstance(schema, dict):
                raise ValueError(f"%json takes a schema, which is a JSON object, not {shown(json.dumps(schema))}")
            parts += [lark[done : found.start()], f"%json {schemas.written(schema)}"]
            done = at
    if meeting >= meets.MAX_MET:
        raise ValueError(f"it holds {meeting} `&`, and at most {meets.MAX_MET - 1} are allowed: expand them by hand")
    return LLMatcher.grammar_from_lark("".join([*parts, lark[done:]]))
