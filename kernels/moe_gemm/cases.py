"""Cases of the chosen experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.linear.cases import QUANTIZED, fp4, packed_int
from kernels.linear.gguf_cases import gguf_weight
from kernels.linear.share_cases import spread
from kernels.moe_gemm.few_fp8_cases import few_fp8_cases
from kernels.registry import Case
from kernels.routing import ExpertBiases
from kernels.testing import TOLERANCES, randn
from kernels.weight import Dense, Fp8, Int8, Parts, Weight
from kernels.weight.gguf import row_bytes
from kernels.weight.inputs import AS_THEY_ARE, Inputs

# gate_up and down by name
Weights = dict[str, Weight]
# of a table of a shape
Draw = Callable[[torch.Generator, torch.device, tuple[int, ...]], Weight]


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    small: bool = True,
    absent: int = 0,
    residual: bool = False,
    weights: Callable[[torch.device, torch.Generator], Weights] | None = None,
    biased: bool = False,
    **options: Any,
) -> Case:
    """weights: draws gate_up and down; None draws dense ones. biased: both have biases."""

    def dense(device: torch.device, g: torch.Generator) -> Weights:
        up = Dense(randn(g, device, dtype, e, 2 * inter, hidden, scale=hidden**-0.5))
        return {"gate_up": up, "down": Dense(randn(g, device, dtype, e, hidden, inter, scale=inter**-0.5))}

    def biases(device: torch.device, g: torch.Generator) -> ExpertBiases:
        return ExpertBiases(randn(g, device, dtype, e, 2 * inter), randn(g, device, dtype, e, hidden))

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        experts = torch.rand(t, e + absent, generator=g, device=g.device).argsort(dim=-1)[:, :k].int()
        return {
            "x": randn(g, device, dtype, t, hidden),
            **(weights or dense)(device, g),
            "weights": torch.rand(t, k, generator=g, device=g.device).to(device),
            "experts": experts.to(device),
            "residual": randn(g, device, dtype, t, hidden) if residual else None,
            **options,
            **({"biases": biases(device, g)} if biased else {}),
        }

    hit = min(e, t * k)
    moved = dtype.itemsize * (hit * 3 * hidden * inter + (3 if residual else 2) * t * hidden) + t * k * 8
    return Case(name, dtype, make, TOLERANCES[dtype], bytes=moved, flops=6 * t * k * hidden * inter, small=small)


def packed_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    bits: int = 4,
    group: int = 32,
    zeros: bool = False,
    ordered: bool = False,
    rounding: Inputs = AS_THEY_ARE,
    columns: int = 0,
    **options: Any,
) -> Case:
    """Experts of packed integers. columns: of the second product, more than its inputs."""

    def weights(device: torch.device, g: torch.Generator) -> Weights:
        up = packed_int(g, device, (e, 2 * inter, hidden), bits, group, zeros, ordered, rounding=rounding)
        wide = packed_int(g, device, (e, hidden, columns or inter), bits, group, zeros, ordered, rounding=rounding)
        return {"gate_up": up, "down": spread(g, wide, inter) if columns else wide}

    hit = min(e, t * k)
    moved = hit * 3 * hidden * inter * bits // 8 + dtype.itemsize * 2 * t * hidden + t * k * 8
    plain = case(name, dtype, t, hidden, inter, e, k, weights=weights, **options)
    return replace(plain, bytes=moved, tolerance=QUANTIZED if rounding.number else plain.tolerance)


def fp4_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    group: int = 32,
    factors: bool = False,
    rounds: bool = False,
    **options: Any,
) -> Case:
    """Experts of 4-bit floats; rounds: their products round their inputs too."""

    def weights(device: torch.device, g: torch.Generator) -> Weights:
        up = fp4(g, device, (e, 2 * inter, hidden), group, factors, rounds)
        return {"gate_up": up, "down": fp4(g, device, (e, hidden, inter), group, factors, rounds)}

    numbers = min(e, t * k) * 3 * hidden * inter
    moved = numbers // 2 + numbers // group + dtype.itemsize * 2 * t * hidden + t * k * 8
    return replace(case(name, dtype, t, hidden, inter, e, k, weights=weights, **options), bytes=moved)


def fp4_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        fp4_case("mxfp4, odd sizes", f32, 3, 36, 21, 6, 2, residual=True),
        fp4_case("nvfp4, many pairs", bf16, 45, 200, 136, 5, 3, 16, True, residual=True),
        fp4_case("nvfp4, clipped, gelu", f32, 12, 72, 40, 6, 2, 16, True, limit=0.5, activation="gelu_tanh"),
        fp4_case("mxfp4, experts that live elsewhere", f32, 20, 40, 24, 4, 3, absent=4),
        fp4_case(
            "mxfp4, biases, swiglu_oai",
            bf16,
            13,
            96,
            72,
            6,
            4,
            biased=True,
            activation="swiglu_oai",
            limit=1.0,
            residual=True,
        ),
        fp4_case("mxfp4, a pair a tile", bf16, 3, 320, 192, 6, 4, biased=True, activation="swiglu_oai", limit=1.0),
        fp4_case("nvfp4, a pair a tile, gelu", bf16, 2, 192, 320, 5, 4, 16, True, activation="gelu_tanh", absent=3),
        # Tiles of eight pairs by 128 and by 64 rows, of sixteen and of thirty-two.
        fp4_case("mxfp4, few pairs of an expert", bf16, 14, 256, 128, 12, 3, residual=True, absent=1),
        fp4_case("nvfp4, few pairs of an expert", bf16, 14, 320, 192, 12, 3, 16, True, biased=True, limit=1.0),
        fp4_case("mxfp4, ten pairs of an expert", bf16, 20, 192, 320, 6, 3, residual=True, absent=1),
        fp4_case("mxfp4, twenty pairs of an expert", bf16, 41, 192, 128, 6, 3, residual=True, absent=1),
        # Programs share tiles, as many as the name says on a GPU of 132 multiprocessors.
        fp4_case(
            "mxfp4, up by 2",
            bf16,
            1,
            2112,
            64,
            6,
            4,
            biased=True,
            activation="swiglu_oai",
            limit=1.0,
            small=False,
        ),
        fp4_case("mxfp4, down by 4", bf16, 1, 128, 4160, 6, 4, biased=True, absent=2, residual=True, small=False),
        fp4_case("nvfp4, up by 3", bf16, 3, 3136, 128, 6, 4, 16, True, activation="gelu_tanh", absent=3, small=False),
        fp4_case("mxfp4, written out", bf16, 50, 72, 40, 4, 3, biased=True, activation="swiglu_oai", limit=1.0),
        fp4_case("nvfp4, written out", f32, 66, 40, 24, 3, 2, 16, True, residual=True),
        fp4_case("nvfp4, rounded inputs", f32, 9, 64, 48, 6, 2, 16, True, rounds=True),
        fp4_case("mxfp4, batch-invariant", bf16, 11, 40, 24, 5, 3, deterministic=True),
    ]
    for t in (1, 8, 64, 1024):
        made.append(fp4_case(f"{t} tokens, 6 of 256 mxfp4 experts of 2048", bf16, t, 4096, 2048, 256, 6, small=False))
    return made


def w8a8_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    inputs: Inputs,
    block: tuple[int, int] | None = None,
    whole: bool = False,
    **options: Any,
) -> Case:
    """Experts of 8-bit floats with a scale a block, or a row; `whole`: of integers."""
    plain = case(name, dtype, t, hidden, inter, e, k, **options)

    def weight(numbers: torch.Tensor, g: torch.Generator) -> Fp8 | Int8:
        wide, k = numbers.float(), numbers.shape[-1]
        if whole:
            scale = wide.abs().amax(dim=-1, keepdim=True) / 127.5
            return Int8((wide / scale).round().clamp(-128, 127).to(torch.int8), scale, inputs)
        high, width = block or (1, k)
        shape = (len(wide), -(-wide.shape[1] // high), -(-k // width))
        scale = torch.rand(shape, generator=g, device=g.device).to(wide.device) * k**-0.5 / 64 + 1e-5
        data = (wide * 64 * k**0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
        static = None if inputs.scale is None else inputs.scale.to(wide.device)
        return Fp8(data, scale, (high, width), replace(inputs, scale=static))

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        given = plain.make(device, g)
        return {**given, "gate_up": weight(given["gate_up"].data, g), "down": weight(given["down"].data, g)}

    moved = min(e, t * k) * 3 * hidden * inter + dtype.itemsize * 2 * t * hidden + t * k * 8
    tolerance = QUANTIZED if inputs.number else plain.tolerance
    return replace(plain, make=make, bytes=moved, tolerance=tolerance)


def w8a8_cases() -> list[Case]:
    f32, bf16, square = torch.float32, torch.bfloat16, (128, 128)
    group, row, byte = Inputs("fp8", 128), Inputs("fp8"), Inputs("int8")
    made = [
        w8a8_case("fp8 blocks, wide inputs, odd sizes", f32, 3, 140, 33, 6, 2, Inputs(), square, residual=True),
        w8a8_case("fp8 blocks", bf16, 9, 256, 144, 6, 3, group, square, residual=True),
        w8a8_case("fp8 blocks of rows, many pairs", bf16, 45, 200, 40, 5, 3, group, (1, 128)),
        w8a8_case("fp8 rows, clipped", bf16, 12, 72, 40, 6, 2, row, limit=0.5, absent=2),
        w8a8_case(
            "int8 both sides, biases",
            f32,
            5,
            136,
            40,
            6,
            2,
            byte,
            whole=True,
            biased=True,
            activation="swiglu_oai",
            limit=1.0,
        ),
        w8a8_case("int8 both sides, gelu", f32, 5, 136, 40, 6, 2, byte, whole=True, activation="gelu_tanh"),
        w8a8_case("int8 weight, wide inputs", bf16, 4, 64, 48, 6, 2, Inputs(), whole=True),
        w8a8_case("fp8 blocks, a pair a tile", bf16, 4, 320, 192, 6, 4, group, square, residual=True),
        w8a8_case("fp8 blocks, pairs of an expert", bf16, 41, 256, 320, 6, 3, group, square, absent=1),
        w8a8_case("fp8 rows, pairs of an expert", bf16, 41, 192, 128, 6, 3, row, activation="gelu_tanh", limit=0.5),
        w8a8_case("mxfp8", bf16, 9, 256, 160, 6, 3, Inputs("fp8", 32, True), (1, 32), residual=True),
        w8a8_case("mxfp8, wide inputs, odd sizes", f32, 5, 72, 40, 6, 2, Inputs(), (1, 32)),
        # Programs share tiles, as many as the name says on a GPU of 132 multiprocessors.
        w8a8_case("fp8 blocks, up by 4", bf16, 1, 4160, 192, 6, 4, group, square, residual=True, small=False),
        w8a8_case("fp8 blocks, down by 2", bf16, 3, 256, 2176, 6, 4, group, square, biased=True, small=False),
        w8a8_case("fp8 rows, up by 3", bf16, 3, 3136, 64, 6, 4, row, limit=0.5, biased=True, small=False),
        # Many pairs of an expert: more than a tile of 128, up to one, up to half of one; some experts are not here.
        w8a8_case("fp8 blocks, 150 pairs of an expert", bf16, 225, 256, 128, 4, 3, group, square, absent=1),
        w8a8_case("fp8 blocks, 90 pairs of an expert", bf16, 120, 384, 384, 4, 3, group, square, residual=True),
        w8a8_case("fp8 blocks, 40 pairs of an expert", bf16, 80, 128, 256, 6, 3, group, square, limit=0.5),
        w8a8_case("fp8 rows, 90 pairs of an expert", bf16, 120, 256, 192, 4, 3, row, absent=1, residual=True),
        w8a8_case("fp8 blocks, batch-invariant", bf16, 11, 128, 24, 5, 3, group, square, deterministic=True),
    ]
    for t in (1, 8, 64, 1024, 8192):
        name = f"{t} tokens, 8 of 128 fp8 experts of 768"
        made.append(w8a8_case(name, bf16, t, 2048, 768, 128, 8, group, square, small=False))
    return made


def packed_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    given = Inputs("fp8", scale=torch.tensor(0.01))
    made = [
        packed_case(
            "int4, odd sizes, inputs in an order", f32, 3, 36, 21, 6, 2, residual=True, zeros=True, ordered=True
        ),
        packed_case("int4, a row an expert", bf16, 2, 64, 48, 8, 3),
        packed_case("int4, many pairs, groups of 128", bf16, 45, 200, 136, 5, 3, group=128, residual=True, zeros=True),
        packed_case("int8, clipped, gelu", f32, 12, 72, 40, 6, 2, 8, 64, limit=0.5, activation="gelu_tanh"),
        packed_case("int4 groups of 32, a pair a tile", bf16, 4, 320, 192, 6, 4, zeros=True, residual=True),
        packed_case("int4 groups of 32, few pairs of an expert", bf16, 14, 256, 192, 12, 3, residual=True, limit=0.5),
        packed_case("int4 groups of 128, ten pairs of an expert", bf16, 20, 320, 128, 6, 3, group=128, zeros=True),
        packed_case("int4 groups of 128, twenty pairs of an expert", bf16, 41, 192, 384, 6, 3, group=128, zeros=True),
        packed_case("int4, one group, a pair a tile", bf16, 4, 320, 192, 6, 4, group=512, limit=0.5),
        # Programs share tiles, as many as the name says on a GPU of 132 multiprocessors.
        packed_case("int4 groups of 32, up by 3", bf16, 3, 3136, 64, 6, 4, zeros=True, residual=True, small=False),
        packed_case("int4 groups of 128, down by 4", bf16, 1, 256, 4224, 6, 4, group=128, limit=0.5, small=False),
        packed_case("int4, written out", bf16, 70, 72, 40, 4, 2, group=128, residual=True, zeros=True),
        packed_case("int4, experts that live elsewhere", f32, 20, 40, 24, 4, 3, absent=4, residual=True),
        packed_case("int4, fp8 inputs", bf16, 9, 256, 144, 6, 3, group=128, residual=True, rounding=Inputs("fp8")),
        packed_case("int4, fp8 inputs of a given scale, many pairs", bf16, 70, 128, 136, 4, 2, rounding=given),
        packed_case("int4, int8 inputs, odd sizes", f32, 5, 72, 40, 6, 2, zeros=True, rounding=Inputs("int8")),
        packed_case("int4, empty columns", bf16, 9, 96, 72, 5, 3, columns=128, zeros=True, residual=True),
        packed_case("int8, empty columns, many pairs", f32, 45, 40, 24, 5, 3, 8, columns=128),
        packed_case("int4, batch-invariant", bf16, 11, 40, 24, 5, 3, deterministic=True),
    ]
    for t in (1, 8, 64, 1024):
        made.append(packed_case(f"{t} tokens, 8 of 384 int4 experts of 2048", bf16, t, 7168, 2048, 384, 8, small=False))
    return made


def apart_case(
    name: str,
    dtype: torch.dtype,
    t: int,
    hidden: int,
    inter: int,
    e: int,
    k: int,
    held: tuple[Draw, ...],
    **options: Any,
) -> Case:
    """Experts of several kinds. held draws each table: those of gate and up, or of gate, up, and that of down."""
    *ups, last = held

    def weights(device: torch.device, g: torch.Generator) -> Weights:
        rows = 2 * inter // len(ups)
        made = tuple(draw(g, device, (e, rows, hidden)) for draw in ups)
        down = last(g, device, (e, hidden, inter))
        return {"gate_up": made[0] if len(made) == 1 else Parts(made), "down": down}

    plain = case(name, dtype, t, hidden, inter, e, k, weights=weights, **options)
    return replace(plain, tolerance=QUANTIZED)


def apart_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16

    def plain(g: torch.Generator, device: torch.device, shape: tuple[int, ...]) -> Weight:
        return Dense(randn(g, device, bf16, *shape, scale=shape[-1] ** -0.5))

    def floats(g: torch.Generator, device: torch.device, shape: tuple[int, ...]) -> Weight:
        wide = randn(g, device, torch.float32, *shape, scale=shape[-1] ** -0.5)
        scale = wide.abs().amax(dim=-1, keepdim=True) / 448
        return Fp8((wide / scale).to(torch.float8_e4m3fn), scale, (1, shape[-1]), Inputs("fp8"))

    def integers(g: torch.Generator, device: torch.device, shape: tuple[int, ...]) -> Weight:
        return packed_int(g, device, shape, 4, 32, rounding=Inputs("int8"))

    def four(g: torch.Generator, device: torch.device, shape: tuple[int, ...]) -> Weight:
        return fp4(g, device, shape, 16, factors=True)

    return [
        apart_case("fp4 gate and up, fp8 down", bf16, 9, 256, 144, 6, 3, (four, floats), residual=True),
        apart_case("int4 gate, fp8 up, dense down", bf16, 20, 72, 40, 6, 2, (integers, floats, plain), limit=0.5),
        apart_case(
            "fp4 gate and up, dense down, swiglu_oai",
            bf16,
            9,
            64,
            40,
            6,
            2,
            (four, plain),
            biased=True,
            activation="swiglu_oai",
            limit=1.0,
        ),
        apart_case(
            "int4 gate, fp8 up, swiglu_oai", f32, 4, 64, 40, 6, 2, (integers, floats, floats), activation="swiglu_oai"
        ),
        apart_case("dense gate and up, int4 down", bf16, 3, 72, 40, 6, 2, (plain, integers), biased=True, absent=2),
        apart_case(
            "fp8 gate, fp4 up, batch-invariant", f32, 11, 64, 48, 5, 3, (floats, four, four), deterministic=True
        ),
    ]


def gguf_case(
    name: str, dtype: torch.dtype, t: int, hidden: int, inter: int, e: int, k: int, formats: str, **options: Any
) -> Case:
    """Experts of blocks of GGUF files. formats: those of gate, up and down."""
    gate, up, down = formats.split()

    def weights(device: torch.device, g: torch.Generator) -> Weights:
        ups = {gate: 2 * inter} if gate == up else {gate: inter, up: inter}
        made: Weights = {"gate_up": gguf_weight(g, device, (e, 2 * inter, hidden), ups)}
        if down == "dense":
            return {**made, "down": Dense(randn(g, device, dtype, e, hidden, inter, scale=inter**-0.5))}
        return {**made, "down": gguf_weight(g, device, (e, hidden, inter), {down: hidden})}

    last = dtype.itemsize * inter if down == "dense" else row_bytes(inter, down)
    held = inter * (row_bytes(hidden, gate) + row_bytes(hidden, up)) + hidden * last
    moved = min(e, t * k) * held + dtype.itemsize * 2 * t * hidden + t * k * 8
    return replace(case(name, dtype, t, hidden, inter, e, k, weights=weights, **options), bytes=moved)


def gguf_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        gguf_case("blocks, gate and up in two formats", f32, 3, 256, 32, 6, 2, "Q4_K Q6_K Q8_0", residual=True),
        gguf_case("blocks, a row an expert", bf16, 2, 256, 64, 8, 3, "Q5_K Q5_K Q5_0"),
        gguf_case("blocks, many pairs, odd sizes", bf16, 45, 256, 96, 5, 3, "Q3_K Q3_K Q4_0", residual=True),
        gguf_case("blocks, and down as it is", bf16, 6, 64, 32, 5, 2, "Q8_0 Q8_0 dense"),
        gguf_case(
            "blocks, biases", f32, 7, 64, 32, 6, 2, "F16 Q4_1 BF16", biased=True, activation="swiglu_oai", limit=1.0
        ),
        gguf_case("blocks, clipped, gelu", f32, 12, 64, 32, 6, 2, "F16 Q4_1 BF16", limit=0.5, activation="gelu_tanh"),
        gguf_case("blocks, experts that live elsewhere", f32, 20, 256, 32, 4, 3, "Q2_K IQ4_XS IQ4_NL", absent=4),
        gguf_case("blocks, batch-invariant", bf16, 11, 64, 32, 5, 3, "Q8_0 Q8_0 Q5_1", deterministic=True),
    ]
    for t in (1, 8, 64, 1024):
        name, formats = f"{t} tokens, Qwen3-30B-A3B Q4_K_M", "Q4_K Q4_K Q6_K"
        made.append(gguf_case(name, bf16, t, 2048, 768, 128, 8, formats, small=False))
    return made


def cases() -> list[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    lite: dict[str, Any] = {"small": False, "residual": True}
    return [
        case("one token", f32, 1, 40, 24, 8, 3),
        case("few tokens, odd sizes, residual", f32, 3, 33, 17, 6, 2, residual=True),
        case(
            "few tokens, biases, swiglu_oai",
            bf16,
            3,
            56,
            24,
            6,
            4,
            biased=True,
            activation="swiglu_oai",
            limit=1.0,
            residual=True,
        ),
        case(
            "one token, biases, deterministic",
            f32,
            1,
            56,
            24,
            6,
            4,
            deterministic=True,
            biased=True,
            activation="swiglu_oai",
            limit=1.0,
        ),
        case("tiles, biases, swiglu_oai", f32, 40, 72, 40, 5, 2, biased=True, activation="swiglu_oai", limit=1.0),
        case("few tokens, swiglu_oai", f32, 2, 40, 16, 6, 2, activation="swiglu_oai"),
        case("few tokens, gelu", bf16, 3, 64, 32, 4, 2, activation="gelu_tanh"),
        case("few tokens, experts that live elsewhere", f32, 4, 32, 16, 4, 3, absent=4),
        case("tiles, odd sizes", f32, 45, 40, 24, 5, 3, residual=True),
        case("tiles, a few pairs each", bf16, 9, 64, 64, 12, 3, residual=True),
        case("tiles, clipped", bf16, 40, 48, 32, 6, 2, limit=0.5),
        case("tiles, gelu", f32, 12, 48, 32, 6, 2, activation="gelu_tanh"),
        case("tiles, experts that live elsewhere", f32, 40, 32, 16, 4, 3, absent=4),
        case("tiles, pairs ordered by several programs", f32, 131, 16, 16, 9, 8, residual=True),
        case("tiles, an expert that nobody chose", bf16, 24, 32, 16, 40, 1),
        case("tiles of 128", bf16, 150, 64, 128, 2, 2, residual=True),
        case("many pairs, short tiles and whole ones", bf16, 300, 64, 192, 5, 3, residual=True),
        case("many pairs, clipped, some of experts that live elsewhere", bf16, 260, 128, 64, 4, 2, absent=3, limit=0.5),
        case("many pairs, gelu", f16, 90, 64, 128, 2, 2, activation="gelu_tanh"),
        case("batch-invariant", bf16, 11, 40, 24, 5, 3, deterministic=True),
        case("no tokens", f32, 0, 32, 16, 4, 2),
        *(
            case(f"{t} tokens, 8 of 128 experts of 768", bf16, t, 2048, 768, 128, 8, **lite)
            for t in (1, 2, 4, 8, 16, 64, 1024, 8192)
        ),
        *(
            case(f"{t} tokens, 8 of 66 experts of 1408", bf16, t, 2048, 1408, 66, 8, **lite)
            for t in (1, 2, 4, 8, 16, 64, 1024, 8192)
        ),
        *(case(f"{t} tokens, 9 of 385 experts of 2048", bf16, t, 7168, 2048, 385, 9, **lite) for t in (1, 64)),
        *w8a8_cases(),
        *few_fp8_cases(w8a8_case),
        *packed_cases(),
        *fp4_cases(),
        *gguf_cases(),
        *apart_cases(),
    ]
