"""What storms send to do harm is served, or refused for what it is, where nothing else goes wrong."""

from __future__ import annotations

import pytest

from tests.chaos import hostile
from tests.chaos.conftest import Keeper

# These end a frontend of tritonserver 2.51, which storms allow for.
DEADLY = {name for name in hostile.BODIES if name.startswith("raw-")}


@pytest.mark.parametrize("name", sorted(set(hostile.BODIES) - DEADLY))
def test_it_is_served_or_refused_with_a_sentence(keeper: Keeper, name: str) -> None:
    fleet = keeper.fleet()
    assert hostile.BODIES[name](fleet, fleet.replicas[0]) is None
