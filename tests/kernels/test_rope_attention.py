"""One kernel for rope, KV write and attention gives what the two ops give, for more sequences than it is used for
too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.registry import Case, Op
from kernels.rope_attention.cases import case
from kernels.rope_attention.dispatch import (
    DISPATCH,
    FusedCut,
    FusedDecodeTile,
    Problem,
    cannot_fuse,
    fused_cut,
    fused_decode_tile,
    fuses,
)
from kernels.testing import TOLERANCES, assert_close, bound, check, outputs, poisoned, seeded
from kernels.thresholds import SHORT_CONTEXT

OP = Op("rope_attention")
BF16 = torch.bfloat16
# Which way a kernel goes does not hang on the dtype; `make test-slow` has the narrow ones too.
SINGLES = [
    pytest.param(
        made,
        id=f"{made.name} {str(made.dtype).removeprefix('torch.')}",
        marks=[] if made.dtype is torch.float32 else pytest.mark.slow,
    )
    for made in OP.cases()
    if made.small and "fused" not in made.name
]


@pytest.fixture
def every_sequence() -> Iterator[None]:
    with DISPATCH.changed("fused", declines=cannot_fuse):
        yield


def test_numbers_of_sequences_that_take_it() -> None:
    def taken(groups: int, **known: bool) -> list[int]:
        given = {"alone": True, "wide": True, **known}
        return [n for n in range(1, 300) if fuses(n, heads=n * groups, **given)]

    assert taken(8) == [1, 2, 3, 4]
    assert taken(4) == [*range(1, 9)]
    assert taken(8, alone=False) == taken(8, wide=False) == taken(64) == [1]


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16, 31])
@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("context", [1, 512, 513])
def test_every_tile_has_a_row_for_the_new_key(group: int, channels: int, seqs: int, context: int) -> None:
    rows = fused_decode_tile(BF16, group, channels, seqs, context).rows
    assert group < rows <= max(16, 2 * group)


@pytest.mark.parametrize(("group", "near", "far"), [(8, 32, 128), (4, 64, 128), (2, 64, 128), (16, 256, 256)])
def test_one_sequence_of_a_short_context_takes_small_tiles(group: int, near: int, far: int) -> None:
    def keys(seqs: int, context: int) -> int:
        tile = fused_decode_tile(BF16, group, 128, seqs, context)
        assert tile.least <= tile.ahead * tile.keys
        return tile.keys

    assert (keys(1, SHORT_CONTEXT), keys(1, SHORT_CONTEXT + 1)) == (near, far)
    assert keys(2, SHORT_CONTEXT) == keys(2, SHORT_CONTEXT + 1) == 256


@pytest.fixture(params=[1, 3], ids="ahead {}".format)
def ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Some tiles of 32 keys are loaded before the wait, of shares of 64 keys or more."""

    def config(problem: Problem) -> FusedCut:
        rows, count = 16 if problem.group < 16 else 32, request.param
        return fused_cut(problem, FusedDecodeTile(rows, 32, 4, 2, programs=4, least=64, near=count + 1, ahead=count))

    with DISPATCH.changed("fused", config=config):
        yield


@pytest.mark.parametrize("made", SINGLES)
@pytest.mark.usefixtures("every_sequence", "ahead")
def test_tiles_of_keys_can_be_on_their_way_before_the_wait(made: Case, device: torch.device) -> None:
    check(made, bound(OP), OP.reference, device)


@pytest.mark.parametrize("made", SINGLES)
@pytest.mark.usefixtures("every_sequence")
def test_any_number_of_sequences_can_take_it(made: Case, device: torch.device) -> None:
    check(made, bound(OP), OP.reference, device)


@pytest.mark.parametrize("seqs", [[(1, 1)], [(1, 700)], [(1, 300), (5, 40)], [(1, 64), (1, 0), (1, 3)]], ids=str)
@pytest.mark.usefixtures("every_sequence")
def test_it_equals_the_two_ops_it_stands_for(seqs: list[tuple[int, int]], device: torch.device) -> None:
    made = case("", BF16, seqs, 8, 2, 64, qk_norm=True, strided=True, bound=1000)
    one = made.make(device, seeded(device))
    two = {**made.make(device, seeded(device)), "fused": False}
    with poisoned():
        got, want = outputs(bound(OP), made, one), outputs(bound(OP), made, two)
    assert torch.equal(got["v_cache"], want["v_cache"])
    for name in want:
        assert_close(name, got[name], want[name], TOLERANCES[BF16])


@pytest.mark.usefixtures("every_sequence")
def test_the_new_key_is_attended_to_before_it_is_in_the_cache(device: torch.device) -> None:
    """A sequence without a past gives its own value, whatever the cache held at its place."""
    made = case("", BF16, [(1, 1)], 4, 2, 64)
    given = made.make(device, seeded(device))
    given["k_cache"].fill_(float("nan"))
    given["v_cache"].fill_(float("nan"))
    values = given["qkv"].view(8, 64)[6:].repeat_interleave(2, dim=0)
    assert torch.equal(bound(OP)(**given)[0], values)
