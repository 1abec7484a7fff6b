"""Numbers with a fraction, which grammars read otherwise than JSON does."""

from __future__ import annotations

import math

import pytest

from engine.structured.decimals import kept, steps, within
from engine.structured.schemas import held


def test_a_number_of_few_digits_is_read_as_itself() -> None:
    assert all(kept(sign * number / 1000) for sign in (1, -1) for number in range(0, 100_000, 7))
    assert kept(1e300)
    assert not kept(0.9171763132459553)
    assert not kept(5e-324)


def test_a_bound_of_more_digits_is_the_nearest_within() -> None:
    bound = 0.9171763132459553
    below, above = within(bound, up=False), within(bound, up=True)
    assert below < bound < above
    assert above - below < 1e-15
    assert within(0.25, up=True) == 0.25


def test_a_step_is_one_for_each_way_to_write_the_number() -> None:
    assert steps(0.12) == [0.12, 0.6, 3]
    assert steps(12) == [12]
    assert steps(0.07)[1:] == [0.7, 7]
    assert math.isclose(steps(0.07)[0], 0.07)


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        ({"multipleOf": 0.53}, r"multipleOf 0\.53"),
        ({"multipleOf": 1e-300}, "multipleOf 1e-300"),
        ({"const": 0.9171763132459553}, r"const 0\.9171763132459553 is read as another"),
        ({"properties": {"a": {"enum": [[0.9171763132459553]]}}}, r"enum 0\.9171763132459553 is read as another"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(schema: dict[str, object], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        held(schema)
