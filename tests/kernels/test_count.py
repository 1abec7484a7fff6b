"""The experts of a prompt's tokens are chosen and counted in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.moe.count import chosen_in_tiles
from kernels.moe_route import kernel as route
from kernels.moe_route.cases import case
from kernels.moe_route.choose import Choice
from kernels.moe_route.logits import logit_partials
from kernels.moe_route.reference import moe_route
from kernels.testing import TOLERANCES, assert_close, seeded, workspace

CASES = {
    "shared": case("", torch.bfloat16, 37, 64, 20, 3, num_shared=2, renormalize=False),
    "one program": case("", torch.float32, 3, 32, 150, 7),
    "groups": case("", torch.float32, 70, 48, 64, 6, num_groups=8, top_groups=3, scale=16.0),
    "correction": case("", torch.float32, 18, 32, 32, 4, score="sigmoid", biased=True, num_groups=4, top_groups=2,
                       group_score="top2"),
}  # fmt: skip


def _parts(inputs: dict[str, Any]) -> tuple[torch.Tensor, Choice]:
    """Logits, and the constants of their choice."""
    router = inputs["router"]
    return logit_partials(workspace(), inputs["x"], router), route.choice(len(router), inputs["routing"])


@pytest.mark.parametrize("name", CASES)
def test_chosen_pairs_stand_in_tiles_of_their_experts(name: str, device: torch.device) -> None:
    inputs = CASES[name].make(device, seeded(device))
    _, want_weights, want = moe_route(**inputs)
    partials, how = _parts(inputs)
    for _ in range(2):  # the second finds the counters as the first left them
        weights, experts, places = chosen_in_tiles(
            workspace(), partials, inputs["routing"].bias, 16, inputs["routing"].scale, how
        )
        assert torch.equal(experts, want)
        assert_close("weights", weights, want_weights, TOLERANCES[torch.float32])
        flat, row, count = experts.flatten().cpu(), places.rows.cpu().flatten().long(), int(places.ends[-1])
        assert len(row.unique()) == len(row) == int(places.tile_pairs[:count].sum())
        assert torch.equal(places.tile_expert.cpu()[row // 16], flat)
        assert bool((row % 16 < places.tile_pairs.cpu()[row // 16]).all())
        assert torch.equal(places.tokens.cpu()[row], torch.arange(len(row), dtype=torch.int32) // experts.shape[1])
