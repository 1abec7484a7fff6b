"""Ops that go several ways by size give the same whichever is taken: latents expanded or not, experts by row or by
tile, scores of a few tokens or of many, weights as they are stored or written out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kernels.gated_mlp import dispatch as gated
from kernels.gated_mlp.cases import case as gated_case
from kernels.gated_mlp.kernel import gated_mlp
from kernels.group_linear import dispatch as groups
from kernels.group_linear.cases import case as group_case
from kernels.group_linear.fp8 import written_out
from kernels.group_linear.kernel import group_linear
from kernels.hardware import group_products
from kernels.latent_attention.cases import case as attention_case
from kernels.latent_attention.kernel import latent_attention
from kernels.latent_write import kernel as write
from kernels.latent_write.cases import case as write_case
from kernels.latent_write.reference import latent_write
from kernels.linear.cases import QUANTIZED
from kernels.moe import dense as experts
from kernels.moe import dispatch, lists
from kernels.moe.cases import case as layer_case
from kernels.moe_gemm import dense as moe
from kernels.moe_gemm.cases import case as experts_case
from kernels.moe_gemm.dispatch import DISPATCH, RowsCut, row_tiles
from kernels.moe_gemm.rows import RowTile
from kernels.moe_route import kernel as route
from kernels.moe_route import logits
from kernels.moe_route.cases import case as route_case
from kernels.registry import Case
from kernels.testing import TOLERANCES, assert_close, check, seeded, workspace
from kernels.weight import Dense
from kernels.weight.inputs import Inputs
from kernels.workspace import Workspace


def made(case: Case, device: torch.device) -> dict[str, Any]:
    return case.make(device, seeded(device))


def test_expanded_sequences_are_absorbed_ones(device: torch.device) -> None:
    seqs = [(1, 20), (5, 5), (70, 90), (3, 130)]
    case = attention_case("", torch.float32, seqs, 3, 32, 16, 16, expanded=True)
    inputs = made(case, device)
    q, kv_up = inputs["q"], inputs["kv_up"]
    # a table that does not turn, and nothing written
    table = torch.tensor([[1.0] * 8 + [0.0] * 8], device=device)
    nowhere = torch.full((len(q),), -1, device=device)
    entry = torch.zeros(len(q), 48, device=device)
    absorbed = latent_write(
        q, entry, kv_up, 0 * nowhere, nowhere, table, inputs["cache"], torch.ones(32, device=device), len(q)
    )
    whole = latent_attention(workspace(), **{**inputs, "absorbed": absorbed, "max_total_context": 0})
    assert_close("expanded", latent_attention(workspace(), **inputs), whole, TOLERANCES[torch.float32])


def test_queries_absorbed_in_a_launch_of_their_own_are_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = write_case("", torch.float32, 70, 2, 160, 16, 32, 40)
    monkeypatch.setattr(write, "OWN_TOKENS", 60)
    assert not write.absorbs_apart(70, 40)
    check(case, partial(write.latent_write, workspace()), latent_write, device)
    monkeypatch.setattr(write, "SEPARATE_ABSORB_TOKENS", 60)
    assert write.absorbs_apart(70, 40)
    check(case, partial(write.latent_write, workspace()), latent_write, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_by_row_are_experts_by_tile(dtype: torch.dtype, device: torch.device) -> None:
    inputs = made(experts_case("", dtype, 7, 48, 32, 6, 3, residual=True), device)
    tiles = moe.moe_gemm(workspace(), **inputs)
    with DISPATCH.changed("rows", declines=lambda problem: None):
        assert_close("rows", moe.moe_gemm(workspace(), **inputs), tiles, TOLERANCES[dtype])


def test_shared_experts_known_before_the_choice_change_nothing(device: torch.device) -> None:
    inputs = made(experts_case("", torch.float32, 2, 48, 32, 6, 3), device)
    inputs["experts"][:, 2] = 5
    assert torch.equal(moe.moe_gemm(workspace(), **inputs), moe.moe_gemm(workspace(), **inputs, num_shared=1))


def test_the_choice_is_the_same_for_few_tokens_and_many(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = made(route_case("", torch.bfloat16, 12, 96, 40, 5, norm=True), device)
    few = route.moe_route(workspace(), **inputs)
    for module, name, threshold in (
        (route, "ONE_LAUNCH_TOKENS", 0),
        (logits, "BF16_THIRDS_TOKENS", 1),
        (logits, "FULL_TOKENS", 1),
    ):
        monkeypatch.setattr(module, name, threshold)
        h, weights, experts = route.moe_route(workspace(), **inputs)
        assert torch.equal(h, few[0])
        assert torch.equal(experts, few[2])
        assert_close("weights", weights, few[1], TOLERANCES[torch.float32])


@pytest.mark.parametrize(
    ("tokens", "mebibytes", "normed", "one"),
    [(1, 64, False, True), (4, 4, False, True), (5, 4, False, False), (8, 4, True, True), (9, 4, True, False),
     (16, 0.5, True, True), (17, 0.5, True, False)],
)  # fmt: skip
def test_a_router_is_not_read_too_often(tokens: int, mebibytes: float, normed: bool, one: bool) -> None:
    assert route.in_one_launch(tokens, int(mebibytes * (1 << 20)), normed) is one


@pytest.mark.parametrize(("tokens", "variant"), [(3, "rows"), (20, "lists")])
def test_experts_chosen_within_another_launch_are_those_chosen_before(
    tokens: int, variant: str, device: torch.device
) -> None:
    case = layer_case("", torch.float32, tokens, 72, 44, 12, 3, norm=True, renormalize=False, scale=1.5)
    inputs = made(case, device)
    with dispatch.DISPATCH.changed(variant):
        got = experts.moe(workspace(), **inputs)
        assert [choice.name for choice in dispatch.DISPATCH.decided().values()] == [variant]
    with dispatch.DISPATCH.changed(variant, declines=lambda problem: "not here"):
        assert_close(variant, got, experts.moe(workspace(), **inputs), TOLERANCES[torch.float32])


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_warp_finds_in_rounds_what_is_chosen_at_once(
    renormalize: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = layer_case("", torch.float32, 20, 64, 44, 12, 3, renormalize=renormalize, num_shared=1, scale=1.5)
    inputs = made(case, device)
    got = experts.moe(workspace(), **inputs)
    monkeypatch.setattr(lists, "in_rounds", lambda *_: False)
    assert_close("rounds", got, experts.moe(workspace(), **inputs), TOLERANCES[torch.float32])


def test_experts_of_a_prompt_counted_with_their_choice_are_those_chosen_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = dispatch.DISPATCH
    case = layer_case("", torch.bfloat16, 40, 64, 64, 12, 3, norm=True, renormalize=False, scale=1.5, num_shared=1)
    inputs = made(case, device)
    with table.changed("lists", declines=lambda problem: "not here"):
        before = experts.moe(workspace(), **inputs)

    def products(workspace: Workspace, h: torch.Tensor, *given: Any) -> torch.Tensor:
        gate_up, down, weights, chosen, residual, _, limit, _ = given
        return moe.moe_gemm(workspace, h, Dense(gate_up), Dense(down), weights, chosen, residual, limit=limit)

    # the products themselves need Hopper: here others take what they are given
    monkeypatch.setattr(dispatch, "grouped_moe", products)
    with (
        table.changed("lists", declines=lambda problem: "not here"),
        table.changed("counted", declines=lambda problem: None),
    ):
        assert_close("counted", experts.moe(workspace(), **inputs), before, TOLERANCES[torch.bfloat16])


def test_a_pipeline_over_parts_of_rows_gives_what_rows_in_registers_give(device: torch.device) -> None:
    inputs = made(layer_case("", torch.float32, 3, 72, 44, 12, 3, norm=True, residual=True), device)
    found = []
    for down in (RowTile(8, 64, 4), RowTile(8, 16, 4, 5)):
        with dispatch.DISPATCH.changed("rows", config=lambda problem, down=down: RowsCut(row_tiles(44).up, down)):
            found.append(experts.moe(workspace(), **inputs))
    assert_close("parts", found[1], found[0], TOLERANCES[torch.float32])


@pytest.mark.parametrize("powers", [True, False])
def test_a_weight_of_groups_written_out_has_the_numbers_that_few_rows_read(powers: bool, device: torch.device) -> None:
    inputs = made(group_case("", torch.bfloat16, 5, 2, 300, 200, fp8=True, powers=powers), device)
    weight = inputs["weight"]
    assert torch.equal(written_out(workspace(), weight, torch.bfloat16), weight.dense(torch.bfloat16))
    with groups.DISPATCH.changed("fp8_rows"):
        got = group_linear(workspace(), **inputs)
        assert [choice.name for choice in groups.DISPATCH.decided().values()] == ["fp8_rows"]
    with groups.DISPATCH.changed("fp8_rows", declines=lambda problem: "not here"):
        before = group_linear(workspace(), **inputs)
        assert [choice.name for choice in groups.DISPATCH.decided().values()] == ["written_out", "rows"]
    assert_close("groups", got, before, TOLERANCES[torch.bfloat16])


def test_a_kind_of_weight_that_groups_do_not_take_is_named(device: torch.device) -> None:
    inputs = made(group_case("", torch.bfloat16, 1, 2, 256, 128, fp8=True), device)
    weight = replace(inputs["weight"], block=(1, 128), scale=torch.ones(2, 128, 2, device=device))
    with pytest.raises(TypeError, match=r"kind Fp8 in blocks of \(1, 128\)"):
        group_linear(workspace(), inputs["x"], weight)


def test_an_activation_that_clips_within_a_product_gives_what_a_launch_of_its_own_does(device: torch.device) -> None:
    if not group_products(device):
        pytest.skip("one row streams on Hopper")
    square = ((128, 128), Inputs("fp8", 128, True))
    case = gated_case("", torch.bfloat16, 1, 4096, 2048, fp8=square, limit=0.25, norm=True, residual=True)
    with gated.DISPATCH.changed("clipped_row"):
        got = gated_mlp(workspace(), **made(case, device))
        assert [choice.name for choice in gated.DISPATCH.decided().values()] == ["clipped_row"]
    with gated.DISPATCH.changed("clipped_row", declines=lambda problem: "not here"):
        assert_close("clipped", got, gated_mlp(workspace(), **made(case, device)), QUANTIZED)
