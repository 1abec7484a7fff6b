"""Keys of equal decode lines are cut into no more shares than there are programs that run at once."""

from __future__ import annotations

import pytest

from kernels.paged_attention.kernel import dealt_to


def shares(length: int, mean: int, tiles: int, programs: int, keys: int = 64) -> int:
    """How many a line has among `tiles` of `mean` keys, by the arithmetic of `fair_share` and `even_shares`."""
    share = -(-max(mean * tiles // programs, keys) // keys) * keys
    return -(-length // share)


@pytest.mark.parametrize("programs", [264, 396, 528])
def test_all_shares_of_equal_lines_run_in_one_wave(programs: int) -> None:
    for tiles in range(1, programs + 1):
        for length in (300, 1024, 1111, 4096):
            assert tiles * shares(length, length, tiles, dealt_to(programs, tiles)) <= programs


def test_a_line_is_not_cut_for_a_few_keys_more_than_the_others_have() -> None:
    assert shares(1280, 1088, 256, 264) == 2, "where programs are dealt out to the last"
    assert shares(1280, 1088, 256, dealt_to(264, 256)) == 1
    assert shares(16384, 1088, 256, dealt_to(264, 256)) > 8


def test_where_lines_are_more_than_programs_nothing_is_left_out() -> None:
    assert dealt_to(264, 512) == 264
