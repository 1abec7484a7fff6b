"""Lists of modules hold what they say, however many they are."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.reader import ConfigError
from engine.quant import module_names, patterns
from engine.quant.module_names import NOTHING, globs, listed


@pytest.mark.parametrize(
    ("module", "held"),
    [("model.layers.1", True), ("model.layers.1.mlp.up", True), ("model.layers.10", False), ("model.layers", False)],
)
def test_a_name_with_its_parts(module: str, held: bool) -> None:
    assert listed("here", ["model.layers.1"], with_parts=True).hold(module) is held
    assert listed("here", ["model.layers.1"]).hold(module) is (module == "model.layers.1")


GLOBS = st.text("ab.*?[]!^-\\", min_size=1, max_size=8).filter(lambda glob: "-" not in glob)


@given(GLOBS, st.text("ab.^!\\[", max_size=8))
def test_a_pattern_of_file_names_matches_as_pythons_does(glob: str, name: str) -> None:
    assert globs("here", [glob]).hold(name) is fnmatch.fnmatchcase(name, glob)


@pytest.mark.parametrize("glob", ["lm_head*", "model.layers.[0-9].self_attn*", "*.experts.?.up_proj"])
def test_patterns_as_published(glob: str) -> None:
    for name in ("lm_head", "model.layers.3.self_attn.q_proj", "model.layers.13.self_attn", "m.experts.7.up_proj"):
        assert globs("here", [glob]).hold(name) is fnmatch.fnmatchcase(name, glob)
        parts = fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"{glob}.*")
        assert globs("here", [glob], with_parts=True).hold(name) is parts


def test_names_take_no_steps_and_expressions_those_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"model.layers.{layer}" for layer in range(100_000)]
    assert listed("here", many, with_parts=True).steps == 1
    assert globs("here", ["a*b", "a*b", "c"]).steps == 1 + patterns.check("here", ["a.*b$"])
    monkeypatch.setattr(module_names.patterns, "begins", lambda expression, name: pytest.fail("a name was matched"))
    assert listed("here", many, with_parts=True).hold("model.layers.77.mlp")


def test_patterns_without_a_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="one expression too many"):
        globs("here", [f"*{n}*" for n in range(9000)])
    assert globs("here", []) == NOTHING
