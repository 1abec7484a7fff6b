"""The expression of all names but some."""

from __future__ import annotations

import re

import pytest

from engine.structured.other_names import MAX_NAME, has_control, pattern


@pytest.mark.parametrize("names", [["a"], ["a", "ab", "b"], [""], ["", "x", "xy"], ["é", "日本", "x.y"], ['"', "\\"]])
def test_it_matches_each_but_these(names: list[str]) -> None:
    made = pattern(names)
    assert made is not None
    expression = re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", made), re.DOTALL)
    others = {"", "a", "b", "ab", "abc", "ba", "x", "xyz", "é", "éa", "日", "日本語", '"', '""', "\\", "x.y", "xzy"}
    assert {name for name in others if expression.fullmatch(name)} == others - set(names)


def test_a_long_name_has_none() -> None:
    assert pattern(["x" * MAX_NAME]) is not None
    assert pattern(["a", "x" * (MAX_NAME + 1)]) is None


def test_control_characters_have_two_spellings() -> None:
    assert has_control("a\n")
    assert has_control("\x7f")
    assert not has_control('é"\\')
