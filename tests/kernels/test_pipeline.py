"""How deep loops are and how large tiles of attention, where blocks have 99 KiB of shared memory; and that GPUs with
more keep what was tuned there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.compile_all.targets import TARGETS
from kernels.compile_all.tensors import CUDA, inputs, without_memory
from kernels.hardware import MAX_SHARED, MIN_SHARED, Gpu, described, shared_bytes
from kernels.latent_attention.cases import case as latent_case
from kernels.linear import cases as linear
from kernels.moe_gemm.cases import case as experts_case
from kernels.paged_attention.cases import case as paged_case
from kernels.pipeline import AttentionTile, fits, fitting_attention, fitting_stages
from kernels.registry import Case, Op
from kernels.rope_attention.cases import case as rope_case
from kernels.weight.inputs import Inputs
from kernels.workspace import Workspace

BF16 = torch.bfloat16
KIB = 1 << 10


@pytest.mark.parametrize("arch", TARGETS)
def test_blocks_have_what_the_compiled_kernels_are_held_to(arch: int) -> None:
    target = TARGETS[arch]
    with described(Gpu(target.capability, target.multiprocessors)):
        assert shared_bytes(CUDA) == target.shared_bytes


def test_a_cpu_has_the_tiles_of_the_largest() -> None:
    assert shared_bytes(torch.device("cpu")) == MAX_SHARED


@pytest.mark.parametrize(
    ("stages", "loaded", "beside", "fitting"),
    [
        pytest.param(7, 18 * KIB, 0, 6, id="five copies of 18 KiB"),
        pytest.param(6, 18 * KIB, 0, 6, id="no more than was asked for"),
        pytest.param(4, 33 * KIB, 0, 4, id="to the last byte"),
        pytest.param(4, 33 * KIB, 1, 3, id="one byte more"),
        pytest.param(4, 30 * KIB, 60 * KIB, 2, id="beside what stays"),
        pytest.param(3, 200 * KIB, 0, 2, id="a tile that is too large"),
        pytest.param(1, 200 * KIB, 0, 1, id="no pipeline"),
    ],
)
def test_a_pipeline_is_as_deep_as_fits(stages: int, loaded: int, beside: int, fitting: int) -> None:
    assert fitting_stages(stages, loaded, MIN_SHARED, beside) == fitting
    assert fitting_stages(stages, loaded, 163 * KIB, beside) == stages


def test_without_a_pipeline_one_copy_is_held() -> None:
    assert fits(1, MIN_SHARED, MIN_SHARED)
    assert not fits(1, MIN_SHARED, MIN_SHARED, 1)


@pytest.mark.parametrize(
    ("key", "row", "weight", "fewest", "fitting"),
    [
        pytest.param(256, 256, 2, 16, (64, 64, 3), id="all of it"),
        pytest.param(1024, 256, 2, 16, (64, 32, 3), id="half the keys before fewer stages"),
        pytest.param(1024, 1024, 2, 16, (32, 32, 3), id="then half the rows"),
        pytest.param(1024, 900, 2, 64, (64, 32, 2), id="rows that a tile has to hold"),
        pytest.param(2048, 1024, 2, 64, (64, 16, 2), id="fewer keys where two stages do not fit"),
    ],
)
def test_a_tile_of_attention_is_cut_to_what_fits(
    key: int, row: int, weight: int, fewest: int, fitting: tuple[int, int, int]
) -> None:
    tile = AttentionTile(64, 64, 3)
    assert fitting_attention(tile, key, row, weight, MIN_SHARED, fewest) == fitting
    assert fitting_attention(tile, key, row, weight, 163 * KIB, fewest) == tile


def launches(op: str, case: Case, arch: int) -> list[tuple[str, dict[str, Any]]]:
    """Names of kernels and the constants that the op launches them with for the case, on a GPU that is not there."""
    made: list[tuple[str, dict[str, Any]]] = []
    mode, target = FakeTensorMode(allow_non_fake_inputs=True), TARGETS[arch]
    given = inputs(case, mode)
    with described(Gpu(target.capability, target.multiprocessors)):
        workspace = Workspace(CUDA, tuned_gemms=False)
        with (
            without_memory(mode),
            workspace.launched_by(lambda kernel, grid, *_, **options: made.append((kernel.fn.__name__, options))),
        ):
            Op(op).kernel(workspace, **given)
    return made


FEW = linear.case("", BF16, 8, 6144, 2560, small=False)
GATED = linear.case("", BF16, 8, 9728, 2560, activation="silu", small=False)
FP8 = linear.fp8_case("", BF16, 8, 6144, 4096, (128, 128), Inputs("fp8", 128), small=False)
ONE = rope_case("", BF16, [(1, 16384)], 32, 8, 128, bound=16384, small=False)
SOME = rope_case("", BF16, [(1, 1024)] * 3, 32, 8, 128, bound=1024, small=False)
WIDE = paged_case("", torch.float32, [(40, 300)], 4, 1, 256)
EXPERTS = experts_case("", BF16, 1024, 2048, 1408, 8, 2, small=False)
LATENTS = latent_case("", BF16, [(1, 1024)] * 8 + [(7, 64)], 16, 512, 64, 128, small=False, block_size=64)
HEADS = latent_case("", BF16, [(1, 1024)] * 8, 64, 512, 64, 128, small=False, block_size=64)


@pytest.mark.parametrize("arch", [86, 89, 120])
@pytest.mark.parametrize(
    ("op", "case", "kernel", "names", "large", "small"),
    [
        ("linear", FEW, "tile_kernel", ("BN", "STAGES"), (64, 6), (64, 5)),
        ("linear", GATED, "tile_kernel", ("BN", "STAGES"), (64, 4), (64, 3)),
        ("linear", FP8, "fp8_kernel", ("BN", "STAGES"), (128, 7), (128, 6)),
        ("rope_attention", ONE, "attend_single", ("BLOCK_N", "num_stages"), (128, 3), (64, 3)),
        ("rope_attention", SOME, "attend_single", ("BLOCK_N", "num_stages"), (256, 2), (128, 2)),
        ("paged_attention", WIDE, "attend", ("BLOCK_M", "BLOCK_N"), (64, 32), (16, 32)),
        ("moe_gemm", EXPERTS, "tiles_up", ("ROWS", "STAGES"), (128, 4), (128, 3)),
        ("latent_attention", LATENTS, "_split_kernel", ("BLOCK_H", "BLOCK_N", "STAGES"), (16, 64, 3), (16, 32, 3)),
        ("latent_attention", LATENTS, "_attend", ("QUERIES", "BLOCK_N", "num_stages"), (4, 32, 2), (2, 32, 2)),
        ("latent_attention", HEADS, "_split_kernel", ("BLOCK_H", "BLOCK_N", "STAGES"), (64, 32, 3), (16, 32, 3)),
    ],
)
def test_launches_fit_the_gpu(
    op: str, case: Case, kernel: str, names: tuple[str, ...], large: tuple[int, ...], small: tuple[int, ...], arch: int
) -> None:
    for held, want in ((80, large), (arch, small)):
        (constants,) = [options for name, options in launches(op, case, held) if name == kernel]
        assert tuple(constants[name] for name in names) == want
