"""How many launches an op makes where a decode step pays for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.moe.dispatch import DISPATCH
from kernels.registry import Case, Op
from kernels.testing import bound, seeded
from tests.kernels.sizes import decoding, steps


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[str]:
    """Names of the kernels that are launched, in order."""
    names: list[str] = []
    if device.type == "cuda":
        from triton.runtime.jit import JITFunction as Function
    else:
        from triton.runtime.interpreter import InterpretedFunction as Function
    run = Function.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Function, "run", noted)
    return names


def run(op: str, case: Case, device: torch.device) -> None:
    bound(Op(op))(**case.make(device, seeded(device)))


@pytest.mark.parametrize("seqs", [1, 5])
def test_gated_delta_net_takes_two_launches_for_sequences_of_one_token(
    seqs: int, launched: list[str], device: torch.device
) -> None:
    run("delta_net", steps()["delta_net"]["decoding"](seqs), device)
    assert launched == ["_step", "_norm"]


def test_a_prompt_beside_decoding_sequences_is_normed_with_them(launched: list[str], device: torch.device) -> None:
    run("delta_net", steps()["delta_net"]["mixed"](2), device)
    assert launched == ["_step", "_conv", "_prepare", "_carry", "_norm"]


def test_a_decoding_sequence_is_compressed_and_kept_in_one_launch(launched: list[str], device: torch.device) -> None:
    run("compress_kv", steps()["compress_kv"]["decoding"](3), device)
    assert launched == ["_compress"]


def test_nothing_is_scored_when_no_sequence_can_have_more_entries_than_places(
    launched: list[str], device: torch.device
) -> None:
    from kernels.index_topk.cases import case

    for top_k, kernels in ((200, ["_select"]), (8, ["_score", "_select"])):
        launched.clear()
        run("index_topk", case("", torch.bfloat16, decoding(2), 2, 16, 4, top_k, 16), device)
        assert launched == kernels


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [
        (1, ["row_scores", "up", "down"]),
        (8, ["_few", "_count", "tiles_up", "tiles_down", "combine"]),
        (64, ["_norm", "step_scores", "choose_and_list", "tiles_up", "tiles_down", "combine"]),
    ],
)
def test_experts_are_chosen_where_they_are_needed(
    tokens: int, kernels: list[str], launched: list[str], device: torch.device
) -> None:
    run("moe", steps()["moe"]["tokens"](tokens), device)
    assert launched == kernels


def test_experts_that_products_do_not_find_are_chosen_before(launched: list[str], device: torch.device) -> None:
    with DISPATCH.changed("rows", declines=lambda problem: "not here"):
        run("moe", steps()["moe"]["tokens"](1), device)
    assert launched == ["_few", "rows_up", "rows_down"]
