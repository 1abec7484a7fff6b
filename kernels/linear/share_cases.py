"""Inputs of products with packed integers whose columns are more than x has inputs, as those of a rank that takes some
of the inputs in an order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.registry import Case
from kernels.weight import PackedInt
from kernels.weight.packed import integers, packed


def spread(generator: torch.Generator, weight: PackedInt, inputs: int) -> PackedInt:
    """`weight`, whose inputs are in place, as one of `inputs` of them in some order; other columns are worth zero."""
    *table, _, columns = weight.shape
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    device = weight.data.device
    chosen = torch.rand((*table, columns), **where).argsort(dim=-1)[..., :inputs].sort(dim=-1).values
    held = torch.rand((*table, inputs), **where).argsort(dim=-1)
    order = torch.zeros((*table, columns), dtype=torch.int64, device=generator.device).scatter_(-1, chosen, held)
    filled = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, chosen, True).to(device)
    most = (1 << weight.bits) - 1
    none = torch.full_like(weight.scale, 1 << (weight.bits - 1)) if weight.zero is None else weight.zero.clamp(max=most)
    numbers = integers(weight.data, weight.bits)[..., :columns]
    worth_zero = none.to(torch.uint8).repeat_interleave(weight.group, dim=-1)[..., :columns]
    made = packed(torch.where(filled[..., None, :], numbers, worth_zero), weight.bits)
    zero = None if weight.zero is None else none
    return replace(weight, data=made, zero=zero, order=order.int().to(device), inputs=inputs)


def share_cases(packed_case: Callable[..., Case], packed_int: Callable[..., PackedInt]) -> list[Case]:
    """Both of `kernels.linear.cases`."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16

    def case(
        name: str,
        dtype: torch.dtype,
        t: int,
        n: int,
        k: int,
        columns: int,
        bits: int,
        group: int,
        zeros: bool = False,
        scales: torch.dtype = torch.bfloat16,
        **given: Any,
    ) -> Case:
        plain = packed_case(name, dtype, t, n, k, bits, group, zeros=zeros, scales=scales, **given)
        rows = 2 * n if given.get("activation") else n

        def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
            wide = packed_int(generator, device, (rows, columns), bits, group, zeros, False, scales)
            held = plain.make(device, generator)
            return {**held, "weight": replace(spread(generator, wide, k), rounding=held["weight"].rounding)}

        return replace(plain, make=make, bytes=plain.bytes + rows * (columns - k) * bits // 8)

    made = [
        case("int4, empty columns, one row", bf16, 1, 72, 300, 384, 4, 32, residual=True),
        case("int4, empty columns, one row, norm", f16, 1, 40, 200, 384, 4, 32, norm=True, zeros=True, scales=f16),
        case("int4, empty columns, few rows", bf16, 7, 136, 500, 640, 4, 32, zeros=True, residual=True),
        case("int4, empty columns, norm, silu", bf16, 19, 72, 180, 256, 4, 32, norm=True, activation="silu"),
        case("int4, empty columns, groups of 16", f32, 3, 50, 201, 256, 4, 16, zeros=True, bias=True),
        case("int8, empty columns", f32, 5, 33, 141, 256, 8, 32, zeros=True, residual=True),
        case("int4, empty columns, many rows", bf16, 260, 40, 301, 384, 4, 32, bias=True, norm=True),
        case("int4, empty columns, deterministic", bf16, 11, 40, 201, 256, 4, 32, deterministic=True, residual=True),
    ]
    large: dict[str, Any] = {"residual": True, "small": False}
    for t in (1, 16, 64, 1024):
        name = f"T{t} Llama-3.1-8B-GPTQ down, of two ranks"
        made.append(case(name, bf16, t, 4096, 7168, 8960, 4, 32, **large))
    return made
