"""The Gluon products of many pairs with experts of 8-bit floats: when they are taken, that they compile for Hopper so
that products run beside sums, and scales by rows.

Those with scales by blocks are held by the cases of `moe_gemm` on a GPU (tests/kernels/test_ops.py): Gluon has no
interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.testing import seeded, workspace
from kernels.weight import Fp8, PackedInt
from kernels.weight.inputs import Inputs
from kernels.workspace import Workspace
from tests.compiled import SHARED_BYTES, run

COMPILE = """
import subprocess
from pathlib import Path

import triton

from kernels.moe_gemm.grouped_fp8 import BOX, INPUTS, OUTPUTS, REGISTERS, GroupedFp8Tile, grouped_fp8_kernel
from tests.compiled import box, for_hopper

lists = {name: "*i32" for name in ("tokens", "tile_expert", "tile_pairs", "ends", "turns")}
descriptors = {
    "x_desc": box(BOX, INPUTS, fp8=True), "w_desc": box(OUTPUTS, INPUTS, fp8=True), "y_desc": box(BOX, BOX)
}
kinds = {"x": "*fp8e4nv", "xs": "*fp32", "ws": "*fp32", **lists, **descriptors}
for gather in (True, False):
    for blocked in (True, False):
        constants = {"GATHER": gather, "BLOCKED": blocked, "STAGES": GroupedFp8Tile().stages, "PDL": True}
        aligned = ("x", "hidden", "tokens")
        made = for_hopper(
            grouped_fp8_kernel, constants, lambda name: kinds.get(name, "i32"), aligned, maxnreg=REGISTERS
        )
        ptx = made.asm["ptx"]
        unrolled = 5 if blocked else 1  # four slices at once, and those that are left
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32") == 2 * unrolled * 4, "two groups"
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k32") == 2 * unrolled * 4, "the same for a short tile"
        assert (ptx.count("cp.async.cg") == 8) == gather, "a tile's rows, 16 bytes a copy"
        open("kernel.ptx", "w").write(ptx)
        ptxas = max((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"))
        command = [ptxas, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "serialized" not in told, told
        print(made.metadata.shared)
"""


@pytest.mark.slow
def test_compiles_for_hopper_with_products_beside_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = [int(size) for size in run(COMPILE, tmp_path).split()]
    assert len(sizes) == 4
    assert all(0 < size <= SHARED_BYTES for size in sizes)


def table(device: torch.device, shape: tuple[int, int, int], blocked: bool, seed: int = 0) -> Fp8:
    g = seeded(device, seed)
    e, n, k = shape
    data = (torch.randn(shape, generator=g, device=g.device) * 64).to(device).to(torch.float8_e4m3fn)
    sizes = (e, n // 128, k // 128) if blocked else (e, n, 1)
    scale = (torch.rand(sizes, generator=g, device=g.device).to(device) + 0.5) * k**-0.5 / 64
    return Fp8(data, scale, (128, 128) if blocked else (1, k), Inputs("fp8", 128 if blocked else 0))


@pytest.mark.parametrize(
    ("tokens", "inter", "dtype", "blocked", "fast", "activation", "taken"),
    [
        (25, 128, torch.bfloat16, True, False, "silu", True),
        (25, 128, torch.float16, True, False, "gelu_tanh", True),
        (24, 128, torch.bfloat16, True, False, "silu", False),
        (25, 128, torch.float32, True, False, "silu", False),
        (25, 128, torch.bfloat16, True, False, "swiglu_oai", False),
        (25, 128, torch.bfloat16, False, False, "silu", False),
        (25, 128, torch.bfloat16, False, True, "silu", True),
        (25, 64, torch.bfloat16, False, True, "silu", False),
    ],
)
def test_it_is_taken_for_many_pairs_in_whole_slices(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    tokens: int,
    inter: int,
    dtype: torch.dtype,
    blocked: bool,
    fast: bool,
    activation: str,
    taken: bool,
) -> None:
    from kernels.moe_gemm import grouped_fp8, quantized, quantized_dispatch

    asked: list[Any] = []
    monkeypatch.setattr(grouped_fp8, "group_products", lambda device: True)
    monkeypatch.setattr(quantized_dispatch, "grouped_fp8_moe", lambda *inputs: asked.append(inputs))
    monkeypatch.setattr(quantized_dispatch, "w8a8_moe", lambda *inputs: None)
    monkeypatch.setattr(quantized, "ring_fits", lambda *inputs: False)
    monkeypatch.setattr(quantized_dispatch, "placed", lambda *inputs: None)
    given = Workspace(device, fast_sums=fast)
    x, weights = torch.empty(tokens, 128, dtype=dtype, device=device), torch.ones(tokens, 1, device=device)
    gate_up, down = table(device, (1, 2 * inter, 128), blocked), table(device, (1, 128, inter), blocked)
    experts = torch.zeros(tokens, 1, dtype=torch.int32, device=device)
    quantized.moe_gemm(given, x, gate_up, down, weights, experts, activation=activation)
    assert bool(asked) == taken


def test_packed_tables_are_none_of_its() -> None:
    from kernels.moe_gemm.grouped_fp8 import grouped_fp8_fits

    cpu = torch.device("cpu")
    packed = PackedInt(torch.zeros(1, 128, 64, dtype=torch.uint8), torch.ones(1, 128, 1), None, None, 4, 128, 128)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    assert not grouped_fp8_fits(x, packed, table(cpu, (1, 128, 128), True), True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon has no interpreter")
def test_scales_by_rows_give_what_tiles_give(device: torch.device) -> None:
    """Tiles of 64 pairs and less, of more, and of more than 128; some experts are not here."""
    from kernels.moe_gemm import quantized

    gate_up, down = table(device, (4, 512, 384), False, 1), table(device, (4, 384, 256), False, 2)
    g = seeded(device, 3)
    for tokens in (60, 180, 500):
        x = torch.randn(tokens, 384, generator=g, device=g.device).to(device).bfloat16()
        experts = torch.rand(tokens, 5, generator=g, device=g.device).argsort(-1)[:, :3].int().to(device)
        weights = torch.rand(tokens, 3, generator=g, device=g.device).to(device)
        tiles = quantized.moe_gemm(workspace(), x, gate_up, down, weights, experts).float()
        fast = Workspace(device, fast_sums=True)
        y = quantized.moe_gemm(fast, x, gate_up, down, weights, experts).float()
        # Rounding to 8 bits of h alone is 2 to 3 %, and one bit of h's own rounding moves some of its numbers.
        assert float((y - tiles).norm() / tiles.norm()) < 0.03
