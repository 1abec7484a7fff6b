"""Drafts in the gated delta rule: a state that accepted tokens advance is the one that they leave without drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gated_delta.cases import case
from kernels.registry import Op
from kernels.testing import bound, seeded

SEQS = [(1, 9), (2, 7), (4, 4), (4, 40)]


def drafted(device: torch.device, kept: list[int]) -> dict[str, Any]:
    made = case("", torch.float32, SEQS, 1, 2, 128, 32, kept=kept).make(device, seeded(device))
    return {**made, "deterministic": True}


def shorter(given: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The accepted tokens as a step of their own, without drafts."""
    batch = given["batch"]
    starts = batch.query_start.tolist()
    rows = [start + i for start, count in zip(starts, kept, strict=False) for i in range(count)]
    lengths = batch.context_len - batch.query_start.diff() + batch.num_kept
    ends = torch.tensor([0, *kept], device=lengths.device).cumsum(0).int()
    plain = replace(batch, query_start=ends, context_len=lengths.int(), num_single=0, num_kept=None)
    return {**given, "batch": plain, **{name: given[name][rows] for name in ("qkv", "a", "b")}}


@pytest.mark.parametrize("kept", [[1, 1, 1, 1], [1, 2, 3, 4]])
@pytest.mark.parametrize("states_only", [False, True])
def test_accepted_tokens_leave_the_bits_that_they_leave_without_drafts(
    states_only: bool, kept: list[int], device: torch.device
) -> None:
    run = bound(Op("gated_delta"))
    given = {**drafted(device, kept), "states_only": states_only}
    plain = shorter(drafted(device, kept), kept)
    run(**given)
    run(**plain)
    assert torch.equal(given["state"], plain["state"])


def test_a_step_that_only_verifies_leaves_states_as_they_were(device: torch.device) -> None:
    given = drafted(device, [0, 0, 0, 0])
    before = given["state"].clone()
    bound(Op("gated_delta"))(**given)
    assert torch.equal(given["state"], before)
