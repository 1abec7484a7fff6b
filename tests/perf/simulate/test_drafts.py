"""What the engine chooses to draft is about as good as the best fixed depth, where drafts pay and where they do not."""

from __future__ import annotations

import pytest

from perf.simulate.drafts import FIXED, Costs, chosen, fixed

TOKENS = 128


@pytest.mark.parametrize("acceptance", [0.9, 0.82, 0.4])
@pytest.mark.parametrize(("streams", "requests"), [(1, 12), (8, 48), (64, 192)])
def test_the_chosen_depth_comes_near_the_best_fixed_one(streams: int, requests: int, acceptance: float) -> None:
    load = streams, requests, TOKENS
    best = max(fixed(Costs(), acceptance, depth, *load) for depth in (0, *FIXED))
    assert chosen(Costs(), acceptance, *load) >= 0.95 * best


@pytest.mark.parametrize(("streams", "requests"), [(1, 12), (8, 48), (64, 192), (256, 512)])
def test_drafts_that_never_stand_cost_next_to_nothing(streams: int, requests: int) -> None:
    load = streams, requests, TOKENS
    assert chosen(Costs(), 0.0, *load) >= 0.98 * fixed(Costs(), 0.0, 0, *load)


def test_drafts_that_cost_a_step_each_are_left() -> None:
    dear = Costs(depth=4.0, token=0.5)
    assert chosen(dear, 0.9, 8, 48, TOKENS) >= 0.97 * fixed(dear, 0.9, 0, 8, 48, TOKENS)


def test_a_step_is_padded_to_entries_and_depth() -> None:
    costs = Costs()
    assert costs.step(5, 5, 4) - costs.step(5, 0, 0) == pytest.approx(4 * costs.depth + 8 * 4 * costs.token)
