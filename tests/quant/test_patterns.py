"""Expressions that a checkpoint brings take no time to match."""

from __future__ import annotations

import pytest

from engine.models.reader import ConfigError
from engine.quant import patterns


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head",
        r"model\.layers\.(1[0-9]|2)\.mlp\.(gate|up)_proj$",
        r"^(?!.*visual)model\.[a-z_0-9]+\..*",
        r".*\.experts\.\d{1,3}\.down_proj",
        r"[)*+]\)\*{2}(a)?",
        "",
    ],
)
def test_what_published_checkpoints_have_is_taken(pattern: str) -> None:
    patterns.check("here", pattern)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        (r"^(([a-z_0-9]|\.)+)+[A-Z]$", "repeats a group"),
        ("(a|a)*b", "repeats a group"),
        ("(x{1,9}){1,9}", "repeats a group"),
        (".*.*.*.*.*Z", "5 repeats without an end"),
        ("a{2,}.+.*b+c*", "5 repeats without an end"),
        ("(" * 5000 + ")" * 5000, "10000 characters"),
        ("(", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
    ],
)
def test_what_may_take_for_ever_is_refused(pattern: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        patterns.check("here", pattern)
