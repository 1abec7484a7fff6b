"""Inputs of the matrix product: every size class of rows, with each neighbour that may be fused, and odd sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kernels.linear import gguf_operand
from kernels.linear.fine_cases import fine_cases
from kernels.linear.fp8_row_cases import fp8_row_cases
from kernels.linear.gguf_cases import with_blocks
from kernels.linear.model_shapes import QWEN3_8B
from kernels.linear.parts_cases import with_parts
from kernels.linear.row_cases import row_cases
from kernels.linear.share_cases import share_cases
from kernels.registry import Case, Tolerance
from kernels.testing import TOLERANCES, randn
from kernels.weight import Dense, Fp4, Fp8, Int8, PackedInt
from kernels.weight.gguf import FORMATS
from kernels.weight.inputs import AS_THEY_ARE, Inputs
from kernels.weight.packed import packed

# The reference rounds after each part, kernels that have them inside once: norm, product, activation and sum add up.
FUSED = {
    torch.float32: Tolerance(max_rel=2e-5, rms=5e-6),
    torch.bfloat16: Tolerance(max_rel=3e-2, rms=1.6e-2),
    torch.float16: Tolerance(max_rel=4e-3, rms=2e-3),
}
# An input that stands between two 8-bit numbers may be rounded to either: they are an eighth apart.
QUANTIZED = Tolerance(max_rel=5e-2, rms=2.5e-2)


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    n: int,
    k: int,
    *,
    bias: bool = False,
    norm: bool = False,
    activation: str | None = None,
    residual: bool = False,
    offset: float = 0.0,
    deterministic: bool = False,
    small: bool = True,
) -> Case:
    """n counts outputs: behind an activation the weight has 2n rows."""
    rows = 2 * n if activation else n

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn(generator, device, dtype, t, k),
            "weight": Dense(randn(generator, device, dtype, rows, k, scale=k**-0.5)),
            "bias": randn(generator, device, dtype, rows) if bias else None,
            "norm_weight": randn(generator, device, dtype, k) if norm else None,
            "eps": 1e-6,
            "offset": offset,
            "residual": randn(generator, device, dtype, t, n) if residual else None,
            "activation": activation,
            "deterministic": deterministic,
        }

    moved = (rows * k + t * k + t * n * (2 if residual else 1)) * dtype.itemsize
    tolerance = FUSED[dtype] if norm or activation or residual else TOLERANCES[dtype]
    return Case(name, dtype, make, tolerance, bytes=moved, flops=2 * t * rows * k, small=small)


def fp8_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    n: int,
    k: int,
    block: tuple[int, int] | None,
    inputs: Inputs,
    *,
    small: bool = True,
    **fused: Any,
) -> Case:
    """block None: a scale a row."""
    plain = case(name, dtype, t, n, k, small=small, **fused)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        given = plain.make(device, generator)
        rows = len(given["weight"].data)
        high, wide = block or (1, k)
        shape = (-(-rows // high), -(-k // wide))
        scale = torch.rand(shape, generator=generator, device=generator.device).to(device) * k**-0.5 / 64 + 1e-5
        data = (given["weight"].data.float() * 64 * k**0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
        static = torch.tensor(0.01, device=device) if inputs.scale is not None else None
        return {**given, "weight": Fp8(data, scale, (high, wide), replace(inputs, scale=static))}

    rows = 2 * n if fused.get("activation") else n
    moved = rows * k + (t * k + t * n) * dtype.itemsize
    tolerance = QUANTIZED if inputs.number else FUSED[dtype]
    return Case(name, dtype, make, tolerance, bytes=moved, flops=2 * t * rows * k, small=small)


def fp8_cases() -> list[Case]:
    f32, bf16, square = torch.float32, torch.bfloat16, (128, 128)
    group, row, static = Inputs("fp8", 128), Inputs("fp8"), Inputs("fp8", scale=torch.tensor(0.01))
    mx = Inputs("fp8", 32, True)
    made = [
        fp8_case("fp8 blocks, wide inputs, odd sizes", f32, 3, 200, 300, square, Inputs(), bias=True),
        fp8_case("fp8 blocks, wide inputs", bf16, 17, 96, 256, square, Inputs(), residual=True),
        fp8_case("fp8 blocks", bf16, 1, 200, 384, square, group, residual=True),
        fp8_case("fp8 blocks, odd sizes", bf16, 5, 136, 300, square, group, bias=True),
        fp8_case("fp8 blocks of rows", bf16, 5, 72, 300, (1, 128), group),
        fp8_case("fp8 blocks, norm, silu", bf16, 33, 128, 256, square, group, norm=True, activation="silu"),
        fp8_case("fp8 blocks, powers of two", bf16, 9, 64, 256, square, Inputs("fp8", 128, True)),
        fp8_case("fp8 rows", bf16, 3, 72, 200, None, row, norm=True, residual=True),
        fp8_case("fp8 rows, silu", bf16, 20, 40, 264, None, row, activation="silu"),
        fp8_case("fp8 rows, a given scale of inputs", bf16, 70, 72, 200, None, static),
        fp8_case("fp8 blocks, odd outputs, inputs beyond a block", bf16, 11, 200, 1104, square, group, residual=True),
        fp8_case("fp8 blocks, one row, norm", bf16, 1, 72, 1152, square, group, norm=True, offset=1.0, bias=True),
        fp8_case("fp8 blocks, few rows, inputs beyond a round", bf16, 7, 40, 640, square, group, residual=True),
        fp8_case("fp8 rows, one row, norm", bf16, 1, 40, 384, None, row, norm=True),
        fp8_case("fp8 rows, one row, a given scale", bf16, 1, 40, 640, None, static, residual=True),
        fp8_case("mxfp8", bf16, 9, 72, 1120, (1, 32), mx, residual=True),
        fp8_case("mxfp8, norm, silu, many rows", bf16, 70, 40, 264, (1, 32), mx, norm=True, activation="silu"),
        fp8_case("mxfp8, wide inputs, odd sizes", f32, 3, 72, 300, (1, 32), Inputs(), bias=True),
        fp8_case("fp8 rows, clipped", bf16, 1, 40, 384, None, Inputs("fp8", largest=1.5), norm=True),
        fp8_case("fp8 rows, silu, a given scale", bf16, 64, 136, 528, None, static, activation="silu", bias=True),
    ]
    for t in (1, 8, 64, 1024, 8192):
        for name, n, k, fused in QWEN3_8B:
            made.append(fp8_case(f"T{t} Qwen3-8B-FP8 {name}", bf16, t, n, k, square, group, **fused))
    made.append(fp8_case("T96 fp8 blocks, seven of them a row", bf16, 96, 1024, 896, square, group, small=False))
    for t in (1, 64, 1024):
        made.append(
            fp8_case(f"T{t} Llama-3.1-8B-FP8 down", bf16, t, 4096, 14336, None, row, residual=True, small=False)
        )
    return made


def int8_case(name: str, dtype: torch.dtype, t: int, n: int, k: int, inputs: Inputs, **fused: Any) -> Case:
    plain = case(name, dtype, t, n, k, **fused)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        given = plain.make(device, generator)
        wide = given["weight"].data.float()
        scale = wide.abs().amax(dim=1, keepdim=True) / 127.5
        static = torch.tensor(0.02, device=device) if inputs.scale is not None else None
        data = (wide / scale).round().clamp(-128, 127).to(torch.int8)
        return {**given, "weight": Int8(data, scale, replace(inputs, scale=static))}

    rows = 2 * n if fused.get("activation") else n
    moved = rows * k + (t * k + t * n) * dtype.itemsize
    return replace(plain, make=make, tolerance=QUANTIZED if inputs.number else FUSED[dtype], bytes=moved)


def int8_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    row, static = Inputs("int8"), Inputs("int8", scale=torch.tensor(0.02))
    made = [
        int8_case("int8 both sides, odd sizes", f32, 3, 72, 201, row, bias=True),
        int8_case("int8 both sides, norm, silu", bf16, 20, 40, 264, row, norm=True, activation="silu"),
        int8_case("int8 both sides, several slices", bf16, 2, 72, 1096, row, residual=True),
        int8_case("int8 both sides, a given scale of inputs", bf16, 70, 72, 200, static),
        int8_case("int8 both sides, many rows", f32, 260, 40, 136, row, residual=True),
        int8_case("int8 weight, wide inputs", f32, 5, 33, 136, Inputs(), bias=True),
    ]
    for t in (1, 64, 1024):
        fused: Any = {"residual": True, "small": False}
        made.append(int8_case(f"T{t} Llama-3.1-8B-W8A8 down", bf16, t, 4096, 14336, row, **fused))
    return made


def packed_int(
    generator: torch.Generator,
    device: torch.device,
    shape: tuple[int, ...],
    bits: int,
    group: int,
    zeros: bool = False,
    ordered: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: Inputs = AS_THEY_ARE,
) -> PackedInt:
    """A random weight of `shape` [.., N, K] whose numbers have about the size of K^-0.5."""
    *rows, k = shape
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    numbers = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, **where)
    groups = (*rows, -(-k // group))
    step = k**-0.5 / (1 << (bits - 2))
    scale = ((torch.rand(groups, **where) + 0.5) * step).to(device, scale_dtype)
    zero = None
    if zeros:
        zero = torch.randint(1, (1 << bits) + 1, groups, dtype=torch.int16, **where).to(device)
        zero = zero.to(torch.uint8) if bits == 4 else zero
    order = torch.rand((*rows[:-1], k), **where).argsort(dim=-1).int().to(device) if ordered else None
    given = None if rounding.scale is None else rounding.scale.to(device)
    about = (bits, group, k, replace(rounding, scale=given))
    return PackedInt(packed(numbers, bits).to(device), scale, zero, order, *about)


def fp4(
    generator: torch.Generator,
    device: torch.device,
    shape: tuple[int, ...],
    group: int,
    factors: bool = False,
    rounds: bool = False,
) -> Fp4:
    """A random weight of `shape` [.., N, K] whose numbers have about the size of K^-0.5; groups of 32 have exponents as
    scales, of 16 numbers. rounds: products round their inputs too."""
    *rows, k = shape
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    data = packed(torch.randint(0, 16, shape, dtype=torch.uint8, **where), 4).to(device)
    groups = (*rows, -(-k // group))
    step = k**-0.5 / 3
    factor = (torch.rand(rows, **where) + 0.5).to(device) if factors else None
    if group == 32:
        middle = round(math.log2(step)) + 127
        scale = torch.randint(middle - 1, middle + 2, groups, dtype=torch.uint8, **where)
    else:
        scale = ((torch.rand(groups, **where) + 0.5) * step).to(torch.float8_e4m3fn)
    given = torch.tensor(4 / (6 * 448), device=device) if group == 16 else None
    rounding = Inputs("fp4", group, scale=given) if rounds else AS_THEY_ARE
    return Fp4(data, scale.to(device), factor, group, k, rounding)


def fp4_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    n: int,
    k: int,
    group: int,
    *,
    factors: bool = False,
    rounds: bool = False,
    small: bool = True,
    **fused: Any,
) -> Case:
    plain = case(name, dtype, t, n, k, small=small, **fused)
    rows = 2 * n if fused.get("activation") else n

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {**plain.make(device, generator), "weight": fp4(generator, device, (rows, k), group, factors, rounds)}

    moved = rows * (k // 2 + k // group) + dtype.itemsize * t * (n + k)
    return replace(plain, make=make, bytes=moved)


def fp4_cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    made = [
        fp4_case("mxfp4, odd sizes", f32, 3, 50, 300, 32, bias=True),
        fp4_case("nvfp4, odd sizes, several slices", f32, 2, 72, 1096, 16, residual=True, factors=True),
        fp4_case("nvfp4, inputs end within a byte, silu", f32, 5, 33, 141, 16, activation="silu", factors=True),
        fp4_case("mxfp4, norm", f16, 9, 72, 264, 32, norm=True, offset=1.0),
        fp4_case("mxfp4, more rows than a tile has", bf16, 70, 40, 264, 32, norm=True, residual=True),
        fp4_case("nvfp4, many rows", bf16, 260, 72, 328, 16, bias=True, norm=True, factors=True),
        fp4_case("mxfp4, many rows, silu", f32, 258, 24, 136, 32, activation="silu"),
        fp4_case("nvfp4, deterministic", bf16, 11, 40, 264, 16, deterministic=True, residual=True, factors=True),
        fp4_case("nvfp4, rounded inputs", f32, 5, 40, 272, 16, factors=True, rounds=True, bias=True),
        fp4_case("mxfp4, rounded inputs, many rows", f32, 259, 24, 160, 32, rounds=True, activation="silu"),
    ]
    for t in (1, 16, 64, 1024):
        made.append(fp4_case(f"T{t} 8192 x 8192 mxfp4", bf16, t, 8192, 8192, 32, small=False))
        made.append(fp4_case(f"T{t} 8192 x 8192 nvfp4", bf16, t, 8192, 8192, 16, small=False, factors=True))
    return made


def packed_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    n: int,
    k: int,
    bits: int,
    group: int,
    *,
    zeros: bool = False,
    ordered: bool = False,
    scales: torch.dtype = torch.bfloat16,
    rounding: Inputs = AS_THEY_ARE,
    small: bool = True,
    **fused: Any,
) -> Case:
    plain = case(name, dtype, t, n, k, small=small, **fused)
    rows = 2 * n if fused.get("activation") else n

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        weight = packed_int(generator, device, (rows, k), bits, group, zeros, ordered, scales, rounding)
        return {**plain.make(device, generator), "weight": weight}

    groups = rows * -(-k // group)
    moved = rows * k * bits // 8 + groups * (3 if zeros else 2) + (t * k + t * n) * dtype.itemsize
    tolerance = QUANTIZED if rounding.number else FUSED[dtype]
    return Case(name, dtype, make, tolerance, bytes=moved, flops=2 * t * rows * k, small=small)


def packed_cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    whole: dict[str, Any] = {"zeros": True, "ordered": True}
    floats, byte, static = Inputs("fp8"), Inputs("int8"), Inputs("fp8", scale=torch.tensor(0.01))
    made = [
        packed_case("int4, fp8 inputs, one row, norm", bf16, 1, 72, 1152, 4, 128, rounding=floats, norm=True),
        packed_case("int4, fp8 inputs, many rows, silu", f16, 260, 40, 264, 4, 128, rounding=floats, activation="silu"),
        packed_case("int4, fp8 inputs of a given scale", bf16, 17, 72, 384, 4, 128, rounding=static, residual=True),
        packed_case("int4, int8 inputs, odd sizes", f32, 3, 50, 301, 4, 32, rounding=byte, bias=True, **whole),
        packed_case("int4, int8 inputs, deterministic", bf16, 11, 40, 264, 4, 512, rounding=byte, deterministic=True),
        packed_case("int4 groups of 32, odd sizes", f32, 3, 50, 300, 4, 32, bias=True, **whole),
        packed_case("int4 groups of 128, several slices", f32, 2, 72, 1096, 4, 128, residual=True, zeros=True),
        packed_case("int4 one group, inputs end within a byte", f32, 5, 33, 141, 4, 256, ordered=True),
        packed_case("int8 groups of 64, silu", f32, 4, 40, 200, 8, 64, activation="silu", zeros=True),
        packed_case("int8 rows, norm", f16, 9, 72, 264, 8, 512, norm=True, offset=1.0),
        packed_case("int4 groups of 16, gelu", bf16, 20, 40, 136, 4, 16, activation="gelu_tanh", bias=True),
        packed_case("int4 groups of 256", bf16, 17, 72, 520, 4, 256, residual=True, **whole),
        packed_case("int4, more rows than a tile has", bf16, 70, 40, 264, 4, 128, norm=True, residual=True),
        packed_case("int4, many rows", bf16, 260, 72, 328, 4, 32, bias=True, norm=True, **whole),
        packed_case("int8, many rows, silu", f32, 258, 24, 136, 8, 64, activation="silu"),
        packed_case("int4, deterministic", bf16, 11, 40, 264, 4, 128, deterministic=True, residual=True),
        packed_case("int4 blocks of 128, odd outputs", bf16, 3, 200, 640, 4, 128, zeros=True, residual=True),
        packed_case("int4 blocks of 128, one row, norm", f16, 1, 72, 1152, 4, 128, zeros=True, norm=True, offset=1.0),
        packed_case("int4 blocks of 256, one row, norm", bf16, 1, 40, 640, 4, 256, norm=True, bias=True),
        packed_case("int4 one group, few rows", bf16, 8, 40, 640, 4, 640, zeros=True, residual=True),
        packed_case("int4 one group, one row", f16, 1, 72, 512, 4, 512, bias=True),
        packed_case("int4 blocks of 128, an order, silu", f16, 19, 72, 384, 4, 128, activation="silu", **whole),
        packed_case(
            "int4 blocks of 128, rows of two tiles, silu", bf16, 100, 72, 384, 4, 128, activation="silu", bias=True
        ),
        packed_case("int4 blocks of 128, rows of two tiles", f16, 65, 136, 384, 4, 128, residual=True, **whole),
        packed_case("int4 blocks of 128, one group", bf16, 37, 136, 896, 4, 896, bias=True),
    ]
    for t in (1, 8, 64, 1024, 8192):
        for name, n, k, fused in (
            ("qkv", 6144, 4096, {"norm": True}),
            ("gate and up", 14336, 4096, {"norm": True, "activation": "silu"}),
            ("down", 4096, 14336, {"residual": True}),
        ):
            given: Any = {"small": False, **fused}
            made.append(packed_case(f"T{t} Llama-3.1-8B-W4A16 {name}", bf16, t, n, k, 4, 128, **given))
    for t in (96, 128, 192, 256, 384, 512):
        for name, n, k, given in (
            ("out", 4096, 4096, {"residual": True}),
            ("gate and up", 14336, 4096, {"activation": "silu"}),
            ("down", 4096, 14336, {"residual": True}),
        ):
            made.append(packed_case(f"T{t} Llama-3.1-8B-W4A16 {name}", bf16, t, n, k, 4, 128, small=False, **given))
    large: dict[str, Any] = {"zeros": True, "small": False}
    return [
        *made,
        packed_case("int4, hundreds of rows, odd outputs", bf16, 131, 4136, 4224, 4, 128, bias=True, **large),
        packed_case(
            "int4, hundreds of rows, an order", bf16, 300, 8200, 2176, 4, 128, ordered=True, residual=True, **large
        ),
        packed_case("int4, hundreds of rows, gelu", bf16, 260, 2120, 4352, 4, 256, activation="gelu_tanh", small=False),
        packed_case("int4, hundreds of rows, one group, norm", bf16, 500, 7208, 2432, 4, 2432, norm=True, **large),
        packed_case(
            "int4, one row, wide, silu", bf16, 1, 4160, 4352, 4, 128, activation="silu", bias=True, norm=True, **large
        ),
        packed_case("int4, one row, many inputs, one group", f16, 1, 4032, 8448, 4, 8448, residual=True, **large),
        packed_case("int4, one row, many inputs, norm", bf16, 1, 4032, 8704, 4, 256, norm=True, small=False),
    ]


def gguf_case(
    name: str, dtype: torch.dtype, t: int, n: int, k: int, formats: dict[str, int] | str, **fused: Any
) -> Case:
    """formats: the weight's, or rows of each."""
    plain = replace(case(name, dtype, t, n, k, **fused), tolerance=FUSED[dtype])
    return with_blocks(plain, 2 * n if fused.get("activation") else n, k, formats)


def gguf_cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    made = [gguf_case(f"{name} blocks", f32, 3, 41, 768, name, bias=True) for name in FORMATS]
    mixed, pair = {"Q4_K": 33, "Q6_K": 20, "F16": 7}, {"Q4_K": 24, "Q5_K": 24}
    made += [
        gguf_case("blocks of 32, several of a tile", f32, 2, 20, 96, "Q5_0", residual=True),
        gguf_case("blocks of three formats, several slices", f32, 5, 60, 1280, mixed, bias=True, residual=True),
        gguf_case("Q4_K blocks, silu, norm", bf16, 17, 40, 512, "Q4_K", activation="silu", norm=True),
        gguf_case("blocks, gate and up in two formats", f32, 4, 24, 256, pair, activation="silu"),
        gguf_case("Q6_K blocks, more rows than a tile has", bf16, 70, 40, 256, "Q6_K", bias=True),
        gguf_case("blocks of three formats, many rows", f16, 260, 60, 256, mixed, residual=True, norm=True, offset=1.0),
        gguf_case("IQ4_XS blocks, many rows, gelu", bf16, 258, 24, 256, "IQ4_XS", activation="gelu_tanh", bias=True),
        gguf_case("Q8_0 blocks, deterministic", bf16, 11, 40, 288, "Q8_0", deterministic=True, residual=True),
    ]
    # Of the kernel of few rows: rows that are none of a program's, units that are none of its warps'.
    for name in gguf_operand.FORMS:
        made.append(gguf_case(f"{name} blocks, one row", bf16, 1, 41, 1280, name, bias=True, residual=True, norm=True))
        made.append(gguf_case(f"{name} blocks, three rows", f16, 3, 72, 768, name, residual=True, norm=True))
    made += [
        gguf_case("Q4_K blocks, one row, silu", bf16, 1, 40, 2304, "Q4_K", norm=True, offset=1.0, activation="silu"),
        gguf_case("Q6_K blocks, two rows, gelu", f16, 2, 24, 512, "Q6_K", bias=True, activation="gelu_tanh"),
        gguf_case("blocks, one row, gate and up in two formats", bf16, 1, 24, 256, pair, norm=True, activation="silu"),
        gguf_case("blocks, four rows of two formats, many inputs", bf16, 4, 60, 8448, {"Q8_0": 33, "Q5_K": 27}),
    ]
    # Of the kernel whose columns are rows: rows of a block that is not full, units that programs share.
    for t, n, k, dtype in (
        (4, 41, 2048, bf16),
        (13, 200, 4096, f16),
        (16, 72, 256, bf16),
        (33, 136, 1280, f16),
        (64, 41, 2048, bf16),
    ):
        made.append(gguf_case(f"Q4_K blocks, T{t}", dtype, t, n, k, "Q4_K", bias=True, residual=True, norm=True))
        made.append(gguf_case(f"Q4_K blocks, T{t} silu", dtype, t, n, k, "Q4_K", activation="silu", bias=True))
    made.append(gguf_case("blocks of two formats, T24", bf16, 24, 210, 2048, {"Q4_K": 140, "Q6_K": 70}, residual=True))
    for t in (1, 4, 8, 32, 64, 1024):
        for name, n, k, formats, fused in (
            ("qkv", 6144, 4096, {"Q4_K": 5120, "Q6_K": 1024}, {"norm": True}),
            ("gate and up", 14336, 4096, "Q4_K", {"norm": True, "activation": "silu"}),
            ("down", 4096, 14336, "Q6_K", {"residual": True}),
        ):
            given: Any = {"small": False, **fused}
            made.append(gguf_case(f"T{t} Llama-3.1-8B Q4_K_M {name}", bf16, t, n, k, formats, **given))
    return made


def parts_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    floats = fp8_case("", bf16, 1, 40, 264, None, Inputs("fp8"))
    integers = int8_case("", f32, 1, 40, 136, Inputs("int8"))
    plain = case("parts: dense, fp8, int4", bf16, 5, 128, 264, bias=True, norm=True)
    gated = case("parts: int4 gate, int8 up", f32, 3, 40, 136, activation="silu")
    added = case("parts: residual, deterministic", f32, 70, 72, 136, residual=True, deterministic=True)
    return [
        with_parts(plain, [floats, packed_case("", bf16, 1, 48, 264, 4, 128)], QUANTIZED),
        with_parts(gated, [packed_case("", f32, 1, 40, 136, 4, 32), integers], QUANTIZED),
        with_parts(added, [packed_case("", f32, 1, 24, 136, 8, 64)], FUSED[f32]),
    ]


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for t in (1, 3, 17, 33):
            made.append(case(f"T{t} N96 K128", dtype, t, 96, 128))
            made.append(case(f"T{t} N33 K72 bias, norm", dtype, t, 33, 72, bias=True, norm=True, offset=1.0))
            made.append(case(f"T{t} N40 K264 residual", dtype, t, 40, 264, residual=True))
            made.append(case(f"T{t} N40 K64 norm, silu", dtype, t, 40, 64, norm=True, activation="silu"))
        made.append(case("T2 N40 K64 bias, gelu", dtype, 2, 40, 64, bias=True, activation="gelu_tanh"))
        for t in (5, 16, 64):
            made.append(case(f"T{t} N200 K1096 bias, residual", dtype, t, 200, 1096, bias=True, residual=True))
            made.append(case(f"T{t} N136 K584 bias, silu", dtype, t, 136, 584, bias=True, activation="silu"))
        made.append(case("T7 N50 K61", dtype, 7, 50, 61))
        made.append(case("T1 N12 K12296 residual", dtype, 1, 12, 12296, residual=True))
        for t in (1, 70):
            made.append(
                case(f"T{t} N40 K264 silu, deterministic", dtype, t, 40, 264, activation="silu", deterministic=True)
            )
            made.append(
                case(f"T{t} N40 K264 deterministic", dtype, t, 40, 264, norm=True, residual=True, deterministic=True)
            )
    for dtype in (torch.bfloat16, torch.float16):
        made.append(case("T40 N2056 K264 bias, residual", dtype, 40, 2056, 264, bias=True, residual=True))
        made.append(case("T50 N2088 K2056 bias, residual", dtype, 50, 2088, 2056, bias=True, residual=True))
        made.append(case("T40 N72 K4104 bias, silu", dtype, 40, 72, 4104, bias=True, activation="silu"))
    # A library's product between kernels of a program a row; from 2048 rows on one kernel, where the GPU has it.
    for t in (259, 2055):
        gelu: dict[str, Any] = {"norm": True, "activation": "gelu_tanh", "small": t < 2048}
        made.append(case(f"T{t} N136 K200 norm, gelu", torch.bfloat16, t, 136, 200, **gelu))
        made.append(case(f"T{t} N200 K72 silu", torch.float16, t, 200, 72, activation="silu", small=t < 2048))
    for t in (1, 8, 16, 32, 64, 1024):
        for name, n, k, fused in (
            ("qkv", 6144, 2560, {"norm": True}),
            ("out", 2560, 4096, {"residual": True}),
            ("gate and up", 9728, 2560, {"norm": True, "activation": "silu"}),
            ("down", 2560, 9728, {"residual": True}),
            ("head", 151936, 2560, {"norm": True}),
        ):
            made.append(case(f"T{t} Qwen3-4B {name}", torch.bfloat16, t, n, k, small=False, **fused))
    bf16: Any = {"dtype": torch.bfloat16, "t": 64, "small": False}
    made.append(case("T64 Llama-3.1-8B gate and up", n=14336, k=4096, activation="silu", **bf16))
    made.append(case("T64 Qwen3-30B-A3B out", n=2048, k=4096, residual=True, **bf16))
    made.append(case("T64 DeepSeek-V2-Lite first", n=3648, k=2048, **bf16))
    made.append(case("T64 DeepSeek-V2-Lite out", n=2048, k=2048, residual=True, **bf16))
    made.append(case("T1 Llama-3.1-8B down", torch.bfloat16, 1, 4096, 14336, residual=True, small=False))
    made.append(case("T8192 Qwen3-4B gate and up", torch.bfloat16, 8192, 9728, 2560, activation="silu", small=False))
    return (
        made
        + fp8_cases()
        + fp8_row_cases(fp8_case)
        + int8_cases()
        + packed_cases()
        + fine_cases(packed_case)
        + row_cases(packed_case)
        + share_cases(packed_case, packed_int)
        + fp4_cases()
        + gguf_cases()
        + parts_cases()
    )
