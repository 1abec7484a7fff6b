"""Sums in the order of ranks: every rank holds the bits that adding one rank's part after the other gives."""

from __future__ import annotations

import pytest
import torch

from engine.parallel import communicator as module
from engine.parallel.communicator import Communicator
from tests.parallel.ranks import together

SIZES = [(1, 1), (3, 5), (7, 64), (33, 19)]


def part(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of sizes so different that the order of a sum shows."""
    noise = torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 * rows + rank))
    return (noise * 4.0**rank).to(dtype)


def added(ranks: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    total = part(0, rows, columns, dtype).float()
    for rank in range(1, ranks):
        total = total + part(rank, rows, columns, dtype).float()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_sum_is_added_in_the_order_of_ranks(ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor is gathered in several runs, the last one shorter."""
    monkeypatch.setattr(module, "ORDERED_RUN", 100)

    def work(communicator: Communicator) -> list[torch.Tensor]:
        ordered = communicator.in_order()
        return [ordered.all_reduce(part(communicator.rank, *size, dtype)) for size in SIZES]

    for sums in together(ranks, work):
        for size, ours in zip(SIZES, sums, strict=True):
            assert torch.equal(ours, added(ranks, *size, dtype)), size


def test_a_sum_of_an_empty_tensor_is_empty() -> None:
    sums = together(3, lambda communicator: communicator.in_order().all_reduce(torch.zeros(0, 8)))
    assert all(one.shape == (0, 8) for one in sums)


def test_two_ranks_stay_with_the_library_and_one_is_alone() -> None:
    """A sum of two is the same in any order."""
    assert all(together(2, lambda communicator: communicator.in_order() is communicator))
    assert Communicator().in_order().size == 1
    assert all(together(3, lambda c: c.in_order() is not c and c.in_order().in_order() is not c))
