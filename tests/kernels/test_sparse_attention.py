"""How single queries of attention over compressed entries are cut, and what padding among them gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.hardware import Gpu, described
from kernels.sparse_attention.cases import case
from kernels.sparse_attention.kernel import BLOCK_N, FEW_H, FEW_N, MAX_SPLITS, divided, sparse_attention, whole
from kernels.testing import seeded, workspace

H200, A10 = Gpu((9, 0), 132), Gpu((8, 6), 72)
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("rows", "entries", "heads", "keys", "splits", "one"),
    [
        (1, 512, FEW_H, FEW_N, 10, True),
        (3, 512, FEW_H, FEW_N, 10, True),
        (1, 8192, FEW_H, FEW_N, MAX_SPLITS, False),
        (8, 512, 64, FEW_N, 10, True),
        (16, 512, 64, BLOCK_N, 8, False),
        (64, 512, 64, BLOCK_N, 2, False),
        (200, 512, 64, BLOCK_N, 1, False),
    ],
)
def test_programs_of_single_queries_fit_the_device(
    rows: int, entries: int, heads: int, keys: int, splits: int, one: bool
) -> None:
    with described(H200):
        cut = divided(rows, 64, 128, entries, CUDA)
        assert (cut.heads, cut.keys, cut.splits, cut.one) == (heads, keys, splits, one)
        assert rows > 132 or rows * -(-64 // cut.heads) * cut.splits <= 132


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_device_of_little_shared_memory_has_smaller_tiles(rows: int) -> None:
    with described(A10):
        for cut in (divided(rows, 64, 128, 512, CUDA), whole(64, CUDA)):
            assert (cut.heads, cut.keys) == (FEW_H, BLOCK_N)


@pytest.mark.parametrize("seqs", [1, 2, 5])
def test_padding_reads_nothing(seqs: int, device: torch.device) -> None:
    made = case("", torch.float32, [(1, 30)] * seqs, 3, 24, 8, 12, 16, ratio=4, chosen=6).make(device, seeded(device))
    want = sparse_attention(workspace(), **made)
    context = made["batch"].context_len.clone()
    context[-1] = 0
    made["batch"] = replace(made["batch"], context_len=context)
    got = sparse_attention(workspace(), **made)
    assert torch.equal(got[:-1], want[:-1])
    assert not got[-1].any()
