"""Names of properties that a schema does not list, as an expression.

Where names are held to an expression, grammars let nobody spell a listed one with escapes, as a further one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_NAME = 48  # characters of a name: each is a group within the last

_ANY = "(?s:.*)"
_CONTROL = "".join(map(chr, range(32))) + "\x7f"


def pattern(names: Iterable[str]) -> str | None:
    """An expression that all names but these match, as `patternProperties` has them; None where one is too long.

    A control character has two spellings, so none may stand where a listed name has one.
    """
    tree: dict[str, Any] = {}
    for name in names:
        if len(name) > MAX_NAME:
            return None
        at = tree
        for letter in name:
            at = at.setdefault(letter, {})
        at[""] = {}
    return f"^{_but(tree)}$"


def has_control(name: str) -> bool:
    return any(letter in _CONTROL for letter in name)


def _but(tree: dict[str, Any]) -> str:
    """Texts that do not lead to an end of the tree."""
    listed = [letter for letter in tree if letter]
    other = listed + ([*_CONTROL] if any(letter in _CONTROL for letter in listed) else [])
    ways = [f"[^\\x00{''.join(map(_code, other))}]{_ANY}" if other else f"(?s:.){_ANY}"]
    ways += [_code(letter) + _but(tree[letter]) for letter in listed if letter not in _CONTROL]
    return f"({'|'.join(ways)}){'' if '' in tree else '?'}"


def _code(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"
