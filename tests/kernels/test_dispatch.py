"""Which kernel runs is decided once a shape, by the first variant that accepts it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kernels.dispatch import MAX_SHAPES, Dispatch, Variant
from kernels.sizes import cdiv

ROWS = (1, 2, 8, 16, 17, 32, 33, 64, 65, 512, 2047, 2048, 8192)
SIZES = ((4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (151936, 2560), (1030, 2056))


def problem(rows: int, outputs: int, inputs: int, **other: Any) -> Any:
    """On an H200, in bfloat16, of operands that can be copied in bulk."""
    from kernels.linear.dispatch import Problem

    plain: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "norm": False,
        "activation": None,
        "deterministic": False,
        "copies": True,
        "triton": True,
        "multiprocessors": 132,
    }
    return Problem(rows, outputs, inputs, **{**plain, **other})


def packed_problem(rows: int, outputs: int = 4096, inputs: int = 4096, **other: Any) -> Any:
    """On an H200, of weights that stream."""
    from kernels.linear.packed_dispatch import PackedProblem

    plain = PackedProblem(
        rows, outputs, inputs, gated=False, deterministic=False, vector=False, streams=True, multiprocessors=132
    )
    return plain._replace(**other)


@pytest.mark.parametrize(
    ("rows", "activation", "copies", "expected"),
    [
        (1, None, False, "vector"),
        (1, "silu", False, "vector"),
        (8, None, True, "stream"),
        (8, None, False, "few_rows"),
        (64, "silu", True, "warp_specialized"),
        (64, None, True, "stream"),
        (64, None, False, "library"),
        (256, "silu", True, "library"),
        (2048, "silu", True, "gated_persistent"),
        (2048, "silu", False, "library"),
        (2048, None, False, "library"),
    ],
)
def test_what_runs_of_14336_outputs_and_4096_inputs(
    rows: int, activation: str | None, copies: bool, expected: str
) -> None:
    from kernels.linear.dispatch import DISPATCH

    asked = problem(rows, 14336, 4096, activation=activation, copies=copies)
    assert DISPATCH.choose(asked).name == expected
    invariant = "invariant_few" if rows <= 128 else "invariant_gated" if activation else "invariant_many"
    chosen = DISPATCH.choose(asked._replace(deterministic=True)).name
    assert chosen == (invariant if copies else "invariant")
    assert DISPATCH.choose(asked._replace(dtype=torch.float32, triton=False, copies=False)).name == "library"


def test_every_problem_has_a_winner_and_tiles_where_it_needs_them() -> None:
    from kernels.linear.dispatch import DISPATCH

    for rows, (n, k), act, copies, sms in itertools.product(ROWS, SIZES, (None, "silu"), (True, False), (78, 132)):
        asked = problem(rows, n, k, activation=act, copies=copies, multiprocessors=sms)
        chosen = DISPATCH.choose(asked)
        first = next(variant for variant, why in DISPATCH.refusals(asked) if why is None)
        assert chosen.name == first.name
        assert (chosen.config is None) == (chosen.name == "library")


@pytest.mark.parametrize(
    ("rows", "streams", "deterministic", "expected"),
    [
        (1, True, False, "stream"),
        (128, True, False, "stream"),
        (129, True, False, "written_out"),
        (64, False, False, "tiles"),
        (65, False, False, "written_out"),
        (300, True, True, "invariant"),
    ],
)
def test_packed_weights_are_written_out_for_more_rows_than_a_kernel_has(
    rows: int, streams: bool, deterministic: bool, expected: str
) -> None:
    from kernels.linear.packed_dispatch import DISPATCH

    for (n, k), gated in itertools.product(SIZES, (False, True)):
        asked = packed_problem(rows, n, k, gated=gated, deterministic=deterministic, streams=streams)
        chosen = DISPATCH.choose(asked)
        assert chosen.name == expected
        assert (chosen.config is None) == (expected == "written_out")


@pytest.mark.parametrize(
    ("rows", "other", "expected"),
    [
        (64, {}, "stream"),
        (65, {}, "mixed_input"),
        (96, {}, "mixed_input"),
        (128, {}, "mixed_input"),
        (256, {}, "mixed_input"),
        (512, {}, "mixed_input"),
        (513, {}, "written_out"),
        (256, {"deterministic": True}, "invariant"),
        (128, {"mixed": False}, "stream"),
        (256, {"mixed": False, "streams": False}, "written_out"),
        (128, {"inputs": 2048}, "stream"),
        (256, {"inputs": 2048}, "written_out"),
        (128, {"inputs": 2048, "gated": True}, "mixed_input"),
        (64, {"mixed": False, "fine": True}, "stream"),
        (65, {"mixed": False, "fine": True}, "written_out"),
        (8, {"mixed": False, "fine": True, "deterministic": True}, "invariant"),
    ],
)
def test_hundreds_of_rows_take_large_packed_weights_that_stream(
    rows: int, other: dict[str, Any], expected: str
) -> None:
    """Scales are in the rows' dtype (`mixed`), which a GPU before Hopper never says."""
    from kernels.linear.packed_dispatch import DISPATCH

    assert DISPATCH.choose(packed_problem(rows, **{"mixed": True, **other})).name == expected


@pytest.mark.parametrize(
    ("rows", "n", "k", "tile", "split"),
    [
        (96, 6144, 4096, 64, 1),
        (96, 4096, 4096, 64, 2),
        (128, 28672, 4096, 128, 1),
        (128, 4096, 14336, 128, 4),
        (192, 28672, 4096, 128, 1),
        (256, 6144, 4096, 128, 1),
        (256, 28672, 4096, 256, 1),
        (256, 4096, 14336, 128, 2),
        (384, 6144, 4096, 128, 0),
        (384, 28672, 4096, 128, 0),
        (384, 4096, 14336, 128, 0),
        (512, 6144, 4096, 256, 1),
        (512, 4096, 4096, 128, 1),
    ],
)
def test_tiles_of_packed_weights_are_those_that_were_measured(rows: int, n: int, k: int, tile: int, split: int) -> None:
    from kernels.linear.packed_dispatch import mixed_input_tile

    made = mixed_input_tile(rows, n, k, 132)
    assert (made.rows, made.split) == (tile, split)


@pytest.mark.parametrize("multiprocessors", [78, 132])
@pytest.mark.parametrize(("n", "k"), [(72, 384), (4096, 14336), (28672, 4096), (262144, 8192)])
@pytest.mark.parametrize("rows", [65, 128, 200, 256, 384, 512])
def test_programs_share_tiles_of_packed_weights_as_far_as_they_run_at_once(
    rows: int, n: int, k: int, multiprocessors: int
) -> None:
    from kernels.linear.packed_dispatch import mixed_input_tile

    tile = mixed_input_tile(rows, n, k, multiprocessors)
    count, at_once = cdiv(rows, tile.rows) * cdiv(n, tile.outputs), tile.programs * multiprocessors
    assert tile.split <= max(1, at_once // count)
    programs = count * tile.split or at_once
    assert programs * count * (k // 128) < 1 << 31, "the kernel computes in 32 bits where a program begins"


@pytest.mark.parametrize(
    ("n", "k", "gated", "packed", "fp8"),
    [
        (6144, 4096, False, "vector", "vector"),
        (4096, 8192, False, "row_stream", "vector"),
        (14336, 4096, True, "row_stream", "row_stream"),
        (128256, 4096, False, "row_stream", "row_stream"),
        (4096, 14336, False, "row_stream", "row_stream"),
        (14344, 4096, True, "stream", "row_stream"),
        (4096, 14464, False, "vector", "row_stream"),
        (8192, 28672, False, "row_stream", "tiles"),
    ],
)
def test_one_row_of_a_quantized_weight_takes_a_kernel_of_its_own(
    n: int, k: int, gated: bool, packed: str, fp8: str
) -> None:
    from kernels.linear import fp8_dispatch, packed_dispatch
    from kernels.linear.fp8_dispatch import Fp8Problem

    asked = packed_problem(1, n, k, gated=gated, vector=True)
    assert packed_dispatch.DISPATCH.choose(asked).name == packed
    assert packed_dispatch.DISPATCH.choose(asked._replace(vector=False)).name == "stream"
    floats = Fp8Problem(1, n, k, gated, False, True, False, False, row_streams=True)
    assert fp8_dispatch.DISPATCH.choose(floats).name == fp8
    assert fp8_dispatch.DISPATCH.choose(floats._replace(vector=False, row_streams=False)).name == "tiles"
    assert fp8_dispatch.DISPATCH.choose(floats._replace(deterministic=True)).name == "invariant"


@pytest.mark.parametrize(
    ("rows", "n", "k", "other", "expected"),
    [
        (2, 14336, 4096, {"gated": True}, "row_stream"),
        (3, 4096, 14336, {}, "row_stream"),
        (4, 4096, 14336, {}, "row_stream"),
        (5, 4096, 14336, {}, "stream"),
        (4, 6144, 4096, {}, "row_stream"),
        (4, 4096, 4096, {}, "row_stream"),
        (4, 2048, 4096, {}, "stream"),
        (4, 4096, 14336, {"fine": True}, "stream"),
        (4, 4096, 14464, {}, "stream"),
        (2, 8192, 28672, {}, "row_stream"),
        (4, 16384, 53248, {}, "stream"),
        (4, 4096, 14336, {"streams": False}, "tiles"),
        (4, 4096, 14336, {"deterministic": True}, "invariant"),
    ],
)
def test_up_to_four_rows_of_whole_groups_stand_beside_a_large_packed_weight(
    rows: int, n: int, k: int, other: dict[str, Any], expected: str
) -> None:
    from kernels.linear.packed_dispatch import DISPATCH

    assert DISPATCH.choose(packed_problem(rows, n, k, **other)).name == expected


@pytest.mark.parametrize(
    ("rows", "library", "deterministic", "expected"),
    [(65, True, False, "rounded"), (64, True, False, "apart"), (65, False, False, "apart"), (65, True, True, "apart")],
)
def test_the_activation_between_two_products_rounds_where_both_are_the_librarys(
    rows: int, library: bool, deterministic: bool, expected: str
) -> None:
    from kernels.gated_mlp.dispatch import DISPATCH, Problem

    assert DISPATCH.choose(Problem(rows, library, deterministic)).name == expected


def test_an_activation_that_clips_is_in_the_product_of_one_row_that_streams() -> None:
    from kernels.gated_mlp.dispatch import DISPATCH, Problem

    asked = Problem(1, library=False, deterministic=False, clipped_row=True)
    assert DISPATCH.choose(asked).name == "clipped_row"
    assert DISPATCH.choose(asked._replace(deterministic=True)).name == "apart"
    assert DISPATCH.choose(asked._replace(clipped_row=False)).name == "apart"


def test_weights_of_groups_are_read_as_they_are_stored_by_few_rows() -> None:
    from kernels.group_linear.dispatch import DISPATCH, Problem

    few = Problem(64, 4096, torch.bfloat16, fp8=True, deterministic=False)
    many = few._replace(rows=65)
    assert [DISPATCH.choose(asked).name for asked in (few, many)] == ["fp8_rows", "written_out"]
    dense = [DISPATCH.choose(asked._replace(fp8=False)).name for asked in (few, many)]
    assert dense == ["rows", "library"]
    for fp8, expected in ((True, "fp8_rows"), (False, "rows")):
        chosen = [DISPATCH.choose(few._replace(rows=n, fp8=fp8, deterministic=True)) for n in (1, 16, 17, 64, 4096)]
        assert {choice.name for choice in chosen} == {expected}
        assert len({choice.config for choice in chosen}) == 1, "one tile whatever rows there are"


def test_a_shape_is_decided_once_and_few_are_remembered() -> None:
    asked: list[int] = []
    variant: Variant[int] = Variant("one", lambda n: asked.append(n), lambda n: n, lambda x, n: x, "")  # type: ignore[func-returns-value]
    dispatch = Dispatch([variant])
    assert [dispatch.choose(n).config for n in (7, 7, 8)] == [7, 7, 8]
    assert asked == [7, 8]
    for n in range(MAX_SHAPES + 1):
        dispatch.choose(n)
    asked.clear()
    dispatch.choose(0)
    assert asked == [0]


def test_a_variant_is_changed_for_a_while_and_what_was_decided_is_kept() -> None:
    plain: Variant[int] = Variant("plain", lambda n: None, lambda n: n, lambda x, n: x, "")
    dispatch = Dispatch([Variant("few", lambda n: "many" if n > 3 else None, lambda n: -n, lambda x, n: x, ""), plain])
    assert dispatch.choose(7).name == "plain"
    with dispatch.changed("few", declines=lambda n: None), dispatch.changed("few", config=lambda n: 10 * n):
        assert (dispatch.choose(7).name, dispatch.choose(7).config) == ("few", 70)
    assert dispatch.choose(7).name == "plain"
    with pytest.raises(KeyError), dispatch.changed("other"):
        pass


@pytest.mark.parametrize(
    ("seqs", "queries", "group", "rows"),
    [
        pytest.param(1, 4, 4, 16, id="three drafts"),
        pytest.param(64, 4, 4, 16, id="of many sequences"),
        pytest.param(8, 3, 8, 32, id="more heads that share keys"),
        pytest.param(8, 9, 4, None, id="more queries than a tile has"),
        pytest.param(32, 4, 8, None, id="more of such tiles than run at once"),
    ],
)
def test_entries_of_few_queries_are_a_tile_each(seqs: int, queries: int, group: int, rows: int | None) -> None:
    from kernels.paged_attention import dispatch as attention

    asked = attention.LongerProblem(
        dtype=torch.bfloat16, group=group, kv_heads=8, channels=128, seqs=seqs, tokens=seqs * queries, queries=queries,
        max_context=20480, windowed=False, prompts=True, upcasts=False, deterministic=False, multiprocessors=132,
    )  # fmt: skip
    chosen = attention.LONGER.choose(asked)
    assert (chosen.name == "whole") == (rows is not None)
    if rows is not None:
        assert (chosen.config.tile.rows, chosen.config.tiles, chosen.config.whole) == (rows, seqs, True)


@pytest.mark.parametrize(
    ("seqs", "queries", "differs", "rows"),
    [
        pytest.param(64, 1, {}, 16, id="sequences that fill the GPU twice over"),
        pytest.param(32, 1, {}, 64, id="fewer"),
        pytest.param(64, 5, {}, 64, id="more rows of a sequence than a warp has"),
        pytest.param(64, 1, {"channels": 64}, 64, id="heads for which bits were not compared"),
        pytest.param(64, 1, {"dtype": torch.float32}, 64, id="a type for which they were not"),
    ],
)
def test_deterministic_decode_takes_tiles_of_one_warp(
    seqs: int, queries: int, differs: dict[str, Any], rows: int
) -> None:
    from kernels.paged_attention import dispatch as attention

    asked = attention.LongerProblem(
        dtype=torch.bfloat16, group=4, kv_heads=8, channels=128, seqs=seqs, tokens=seqs * queries, queries=queries,
        max_context=512, windowed=False, prompts=False, upcasts=False, deterministic=True, multiprocessors=132,
    )  # fmt: skip
    chosen = attention.LONGER.choose(asked._replace(**differs))
    assert chosen.name == "invariant"
    assert chosen.config.tile.rows == rows
