"""Splits of keys add up, and equal decode sequences have no more of them than there are programs that run at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.paged_attention.cases import case
from kernels.paged_attention.dispatch import SINGLES, split_cut
from kernels.paged_attention.tiles import Tile, dealt_to
from kernels.registry import Op
from kernels.testing import bound, check

OP = Op("paged_attention")


def splits(length: int, mean: int, tiles: int, programs: int, keys: int = 64) -> int:
    """How many a sequence has among `tiles` of `mean` keys, by the arithmetic of `fair_split_size` and
    `even_splits`."""
    split_size = -(-max(mean * tiles // programs, keys) // keys) * keys
    return -(-length // split_size)


@pytest.mark.parametrize("programs", [264, 396, 528])
def test_all_splits_of_equal_sequences_run_in_one_wave(programs: int) -> None:
    for tiles in range(1, programs + 1):
        for length in (300, 1024, 1111, 4096):
            assert tiles * splits(length, length, tiles, dealt_to(programs, tiles)) <= programs


def test_a_sequence_is_not_cut_for_a_few_keys_more_than_the_others_have() -> None:
    assert splits(1280, 1088, 256, 264) == 2, "where programs are dealt out to the last"
    assert splits(1280, 1088, 256, dealt_to(264, 256)) == 1
    assert splits(16384, 1088, 256, dealt_to(264, 256)) > 8


def test_where_sequences_are_more_than_programs_nothing_is_left_out() -> None:
    assert dealt_to(264, 512) == 264


CUTS = [(0, False, None), (1, False, 610), (4, True, None), (4, True, 610)]


# In turn in one dtype and the other; `make test-slow` has the rest.
@pytest.mark.parametrize(
    ("near", "dealt", "window", "dtype"),
    [
        pytest.param(*cut, dtype, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, cut in enumerate(CUTS)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_any_number_of_splits_adds_up(
    near: int,
    dealt: bool,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A sequence of 700 tokens has 11 splits, no multiple of those that are added up at once, and others have 1 and
    2."""
    tile = Tile(16, 32, warps=4, stages=2, programs=64, least=64, near=near, dealt=dealt)
    made = case("", dtype, [(1, 700), (1, 3), (1, 0), (1, 120)], 4, 2, 80, window=window, bound=2000)
    with SINGLES.changed("split", config=partial(split_cut, tile=tile)):
        check(made, bound(OP), OP.reference, device)


@pytest.mark.parametrize("window", [None, 33])
def test_every_dealt_split_has_a_program(
    window: int | None, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A split is 32 keys, and each sequence has one key more: as many splits as there can be. One without a program
    would leave its sequence unwritten."""
    from kernels.paged_attention import kernel

    tile = Tile(16, 32, warps=4, stages=2, programs=36, least=32, dealt=True)
    monkeypatch.setattr(kernel, "multiprocessors", lambda _: 1)
    made = case("", torch.float32, [(1, 33)] * 17, 2, 2, 32, window=window, bound=2000)
    with SINGLES.changed("split", config=partial(split_cut, tile=tile)):
        check(made, bound(OP), OP.reference, device)
