"""Expressions that a checkpoint brings match as Python's do, in a number of steps that is known before."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.reader import ConfigError
from engine.quant import patterns

PUBLISHED = [
    ".*lm_head",
    r"model\.layers\.(1[0-9]|2)\.mlp\.(gate|up)_proj$",
    r"^(?!.*visual)model\.[a-z_0-9]+\..*",
    r".*\.experts\.\d{1,3}\.down_proj",
    r"[)*+]\)\*{2}(a)?",
    r".*\.(?:18|19)\..*gate.*",
    "",
]
NAMES = [
    "lm_head",
    "model.layers.2.mlp.gate_proj",
    "model.layers.12.mlp.up_proj",
    "model.layers.18.mlp.gate",
    "model.visual.blocks.0.attn.qkv",
    "model.layers.3.mlp.experts.127.down_proj",
    ")**",
    "",
]
# One way after another takes Python longer than anybody waits.
HOSTILE = [
    ".?" * 40 + "!",
    "(?:.|.|.|.|.)" * 16 + "!",
    "(a|a)*b",
    ".*" * 20 + "!",
    ".{0,40}" * 9 + "!",
    r"(?!(?:.?){60}!)(?:.|.)*!",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_what_published_checkpoints_have_matches_as_pythons_do(pattern: str) -> None:
    patterns.check("here", [pattern])
    assert [patterns.begins(pattern, name) for name in NAMES] == [bool(re.match(pattern, name)) for name in NAMES]


REPEATS = ["*", "+?", "?", "{2}", "{1,3}", "{2,}"]
leaves = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", r"\d", "^", "$", r"\b", r"\B"])
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda two: f"(?:{two[0]}){two[1]}"),
        st.tuples(st.sampled_from(["?=", "?!", "?=.*", "?!.+"]), inner).map(lambda two: f"({two[0]}{two[1]})"),
    ),
    max_leaves=6,
)


@given(expressions, st.text("ab.1_", min_size=1, max_size=8))
def test_an_expression_matches_as_pythons_does(pattern: str, name: str) -> None:
    assert patterns.begins(pattern, name) == bool(re.match(pattern, name))


@pytest.mark.parametrize(("pattern", "name"), [(r"a+(?<=aa)b", "aab"), (r"a+(?<=aa)b", "ab"), (r"a(?<!\.a)", ".a")])
def test_what_must_be_behind_a_place(pattern: str, name: str) -> None:
    assert patterns.begins(pattern, name) == bool(re.match(pattern, name))


class Counted(patterns._Character):
    """A character that counts how often it is looked for."""

    looks = 0

    def walk(self, name: patterns._Name, places: int, forward: bool) -> int:
        Counted.looks += 1
        return super().walk(name, places, forward)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_no_name_takes_more_steps_than_were_counted_before(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_Character", Counted)
    monkeypatch.setattr(Counted, "looks", 0)
    patterns._checked.cache_clear()
    try:
        assert not patterns.begins(pattern, "a" * 200)
        assert Counted.looks <= patterns._checked("a regular expression", pattern).steps()
    finally:
        patterns._checked.cache_clear()


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        (r"((((a?b?)*c?)*d?)*e?)*", "one expression too many"),
        ("(" * 5000 + ")" * 5000, "10000 characters"),
        ("(" * 400 + ")" * 400, "more than 20 groups in each other|no regular expression"),
        ("(", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
        (r"(a)\1", "groupref"),
        ("(?i)a", "flags"),
        ("(?i:a)", "subpattern"),
    ],
)
def test_what_no_bound_holds_for_is_refused(pattern: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        patterns.check("here", [pattern])


def test_all_expressions_of_a_configuration_are_counted_together() -> None:
    rules = [rf".*\.layers\.{layer}\.self_attn\.(q|k|v|o)_proj.*" for layer in range(500)]
    patterns.check("here", rules)
    with pytest.raises(ConfigError, match="one expression too many"):
        patterns.check("here", rules * 10)
