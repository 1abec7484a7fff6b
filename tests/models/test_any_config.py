"""Any value at any place of a published config is understood or refused by a sentence, and never a traceback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from engine.models import registry
from engine.models.reader import ConfigError
from tests.models.test_published import SERVED, values

Path = tuple[str, ...]

NUMBERS = st.sampled_from([0, -1, 1, 3, 7, 10**6, 10**400, 0.0, -1.5, 0.5, 1e300, float("nan"), float("inf")])
ATOMS = st.one_of(NUMBERS, st.none(), st.booleans(), st.sampled_from(["", "8", "yarn", "[/x]"]))
VALUES = st.one_of(
    ATOMS,
    st.lists(st.one_of(ATOMS, st.just([1]), st.just({})), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "main", "full_attention"]), ATOMS, max_size=3),
)


def paths(config: dict[str, Any], at: Path = ()) -> Iterator[Path]:
    """The keys of a config and of the objects in it."""
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


PLACES = [(name, path) for name in SERVED for path in paths(values(name))]


@settings(max_examples=150, deadline=None)
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_a_changed_value_is_understood_or_refused(place: tuple[str, Path], value: Any) -> None:
    name, path = place
    config = copy.deepcopy(values(name))
    within = config
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = value
    said = ""
    try:
        registry.parse(config)
    except ConfigError as refusal:
        said = str(refusal)
    assert len(said) < 1500


# What cannot change a token: defaults of generation, ids of the text side, what programs write for themselves.
# The ids that end an answer are read, so they are none of these.
HARMLESS = st.one_of(
    st.sampled_from(sorted(set(GenerationConfig().to_dict()) - {"eos_token_id"})),
    st.sampled_from(["unk_token_id", "mask_token_id", "cls_token_id", "sep_token_id", "_model_name_or_path"]),
    st.text("abcdefghijklmnopqrstuvwxyz_", max_size=12).map(lambda rest: "_" + rest),
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(SERVED), keys=st.dictionaries(HARMLESS, VALUES, max_size=4))
def test_keys_that_cannot_change_a_token_change_nothing(name: str, keys: dict[str, Any]) -> None:
    assert registry.parse({**values(name), **keys}) == registry.parse(values(name))


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(SERVED),
    key=st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12).map(lambda rest: f"x{rest}_factor"),
    value=st.one_of(st.floats(0.1, 9), st.integers(2, 9), st.just(True)),
)
def test_any_other_key_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        registry.parse({**values(name), key: value})
