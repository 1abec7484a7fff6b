"""A grammar that a client wrote, in Lark's notation or in GBNF, within the bounds that llguidance has none for."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher

from engine.structured import combined_patterns, gbnf, schemas
from engine.structured.lark_rules import check_optional, optional_parts
from engine.types import shown

MAX_RULES = 1500  # each a call within llguidance where they lead to each other; 3,000 ended the process
# Texts, comments, expressions and special tokens, in which nothing else stands; an intersection; a schema; the mark
# behind a rule's name; an option that nothing here reads; parts that may be missing; groups.
_MARKS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?:\#|//)[^\n]*|(?P<regex>/(?:\\.|[^/\\])+/)|<[^<>\s]+>|'
    r"(?P<meet>&)|(?P<schema>%json\s*)|(?P<rule>::?)|(?P<warm>\btemperature\s*=)|(?P<optional>[?*])|"
    r"(?P<opened>[(\[{])|(?P<closed>[)\]}])"
)
_decode = json.JSONDecoder().raw_decode


def grammar(text: str) -> str:
    """llguidance's form of it, in which schemas are held as any other is. Raises ValueError for what cannot be
    honoured."""
    lark = gbnf.to_lark(text) if gbnf.is_gbnf(text) else text
    parts, done, at, meeting, optional = [], 0, 0, 0, 0
    calls, depth, deepest = 0, 0, 0
    while (found := _MARKS.search(lark, at)) is not None:
        at = found.end()
        meeting += found["meet"] is not None
        optional += optional_parts(found["regex"]) if found["regex"] else found["optional"] is not None
        depth = max(0, depth + (found["opened"] is not None) - (found["closed"] is not None))
        deepest = max(deepest, depth)
        if found["rule"] is not None:
            calls, depth, deepest = calls + 1 + deepest, 0, 0
        if found["warm"] is not None:
            raise ValueError("temperature of a part cannot be honoured: it is one of the whole answer")
        if found["schema"] is not None:
            schema, at = _decode(lark, at)
            if not isinstance(schema, dict):
                raise ValueError(f"%json takes a schema, which is a JSON object, not {shown(json.dumps(schema))}")
            parts += [lark[done : found.start()], f"%json {schemas.written(schema)}"]
            done = at
    if meeting >= combined_patterns.MAX_MET:
        raise ValueError(
            f"it holds {meeting} `&`, and at most {combined_patterns.MAX_MET - 1} are allowed: expand them by hand"
        )
    check_optional(optional)
    if (calls := calls + deepest) > MAX_RULES:
        raise ValueError(f"its rules and the groups within are {calls}, and at most {MAX_RULES} are allowed")
    return LLMatcher.grammar_from_lark("".join([*parts, lark[done:]]))
