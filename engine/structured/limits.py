"""llguidance's limits on what one grammar may take, and what it says where one is met, in plain words."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_STATES, MAX_ITEMS, MAX_WAYS = 50_000, 20_000, 1_000
# 50,000 states take 65 MB, and so many grammars are kept. A mask's time grows faster than its items: 20,000 take 50 ms,
# 50,000 half a second, and no published schema needs 5,000 (docs/experiments/2026-11-24-hostile-grammars-and-texts.md).
LIMITS = LLParserLimits(
    verbose_errors=False, max_lexer_states=MAX_STATES, step_max_items=MAX_ITEMS, max_items_in_row=MAX_WAYS
)

NOT_ALLOWED = "doesn't satisfy the grammar"  # in what it says of a token that may not stand
# What a message of llguidance's holds, and the sentence for it.
_PLAIN = {
    "NoExtensionBias": "no text satisfies it, or a part of it; a part may refer to itself without end",
    "Current row has": f"more than {MAX_WAYS:,} ways lead on behind one token: make it simpler, or, of a schema, "
    "name the first properties in `required`",
    "Too many items": f"what may follow takes more than {MAX_ITEMS:,} steps to tell: make it simpler",
    "lexer error: ": f"its expressions have more than {MAX_STATES:,} states: make them simpler",
    "Regex is empty": "Unsatisfiable schema: no string satisfies all that it says of strings",
    NOT_ALLOWED: "it does not allow the token that came",
}


def plain(why: str) -> str:
    """What llguidance says, on one line."""
    return next((sentence for told, sentence in _PLAIN.items() if told in why), " ".join(why.split()))
