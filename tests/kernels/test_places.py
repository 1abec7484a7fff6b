"""Pairs of token and expert stand in whole tiles of one expert each, or in their experts' lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.moe.lists import chosen_in_lists
from kernels.moe_gemm.order import placed
from kernels.moe_route.kernel import choice
from kernels.routing import Routing
from kernels.testing import workspace


@settings(deadline=None, max_examples=12)
@given(
    tokens=st.integers(1, 700),
    k=st.integers(1, 4),
    experts=st.integers(1, 9),
    absent=st.integers(0, 3),
    rows=st.sampled_from([64, 128]),
    seed=st.integers(0, 1 << 16),
)
def test_every_pair_has_a_row_in_a_tile_of_its_expert(
    device: torch.device, tokens: int, k: int, experts: int, absent: int, rows: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-absent, experts + absent, (tokens, k), generator=g, dtype=torch.int32)
    places = placed(workspace(), chosen.to(device), experts, rows)
    flat, row = chosen.flatten(), places.rows.cpu().long()
    there = (flat >= 0) & (flat < experts)
    assert (row >= 0).tolist() == there.tolist()
    count = int(places.ends[-1])
    assert count <= places.tiles
    assert places.turns.tolist() == [0, 0]
    tile_expert, tile_pairs = places.tile_expert.cpu()[:count], places.tile_pairs.cpu()[:count]
    # no two in one row, each behind the pairs of its expert before it
    kept, number = row[there], torch.arange(tokens * k)[there]
    assert len(kept.unique()) == len(kept) == int(tile_pairs.sum())
    assert tile_expert[kept // rows].tolist() == flat[there].tolist()
    assert bool((kept % rows < tile_pairs[kept // rows]).all())
    assert places.tokens.cpu()[kept].tolist() == (number // k).tolist()
    for expert in range(experts):
        count = int((flat[there] == expert).sum())
        full = tile_pairs[tile_expert == expert]
        assert full.tolist() == [rows] * (count // rows) + [count % rows] * (count % rows > 0)


def test_few_pairs_of_many_experts_have_a_tile_each(device: torch.device) -> None:
    chosen = torch.arange(2000, dtype=torch.int32).view(-1, 4) % 385
    places = placed(workspace(), chosen.to(device), 385, 128)
    assert len(places.rows.unique()) == 2000
    assert int(places.ends[-1]) == 385


@settings(deadline=None, max_examples=8)
@given(
    tokens=st.integers(1, 40), k=st.integers(1, 4), experts=st.integers(5, 9), shared=st.integers(0, 2),
    hashed=st.booleans(), seed=st.integers(0, 1 << 16),
)  # fmt: skip
def test_every_pair_is_in_the_list_of_its_expert(
    device: torch.device, tokens: int, k: int, experts: int, shared: int, hashed: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    partials = torch.randn(2, tokens, experts, generator=g).to(device)
    # a table may name an expert twice
    table = torch.randint(experts, (7, k), generator=g, dtype=torch.int32).to(device) if hashed else None
    token_ids = torch.randint(7, (tokens,), generator=g).to(device)
    how = choice(experts, Routing(k, table=table, num_shared=shared))
    counts = torch.zeros(experts + shared, dtype=torch.int32, device=device)
    _, chosen, lists = chosen_in_lists(workspace(), partials, counts, None, table, token_ids, 16, 1.0, how)
    flat, taken = chosen.flatten().cpu(), lists.counts.tolist()
    for expert, count in enumerate(taken):
        listed = lists.pairs[expert, :count].sort().values.cpu()
        assert listed.tolist() == (flat == expert).nonzero().flatten().tolist()
    assert sum(max(1, -(-count // 16)) for count in taken) <= lists.tiles
