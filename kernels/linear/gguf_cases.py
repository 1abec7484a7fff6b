"""Inputs of products with blocks of GGUF files."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from kernels.linear.gguf_blocks import PLAIN
from kernels.registry import Case
from kernels.weight import GgufBlocks
from kernels.weight.gguf import FORMATS, dequantize, row_bytes

# Bytes at which a block holds 16-bit floats, which random bytes would make infinite or NaN.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def blocks(name: str, rows: int, count: int, generator: torch.Generator, std: float = 0.5) -> torch.Tensor:
    """Random rows of `count` blocks [rows, bytes] uint8: every bit pattern of numbers and of groups' scales. Numbers
    have the standard deviation `std`."""
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    if name in PLAIN:
        return (torch.randn(rows, count, **where) * std).to(PLAIN[name]).view(torch.uint8)
    size = FORMATS[name].num_bytes
    made = torch.randint(0, 256, (rows, count, size), dtype=torch.uint8, **where)
    drawn = {at: 0.01 * torch.randn(rows, count, 1, **where) for at in SCALES[name]}
    for step in (1.0, 0.0):
        for at, scale in drawn.items():
            # Once more with what brings the spread to what is asked for.
            step = step or std / float(dequantize(made.flatten(1), name).std())
            made[..., at : at + 2] = (scale * step).half().view(torch.uint8)
    return made.flatten(1)


def gguf_weight(
    generator: torch.Generator, device: torch.device, shape: tuple[int, ...], formats: dict[str, int]
) -> GgufBlocks:
    """A random weight of `shape` [.., N, K] whose numbers have about the size of K^-0.5; formats: rows of each."""
    *table, _, k = shape
    tensors = []
    for name, rows in formats.items():
        made = blocks(name, prod(table) * rows, k // FORMATS[name].num_values, generator, k**-0.5)
        tensors.append(made.view(*table, rows, -1).to(device))
    return GgufBlocks(tuple(tensors), tuple(formats), k)


def with_blocks(plain: Case, rows: int, k: int, formats: dict[str, int] | str) -> Case:
    """A case of a dense weight [rows, K] with one of blocks in its place."""
    row_counts = {formats: rows} if isinstance(formats, str) else formats

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {**plain.make(device, generator), "weight": gguf_weight(generator, device, (rows, k), row_counts)}

    held = sum(count * row_bytes(k, name) for name, count in row_counts.items())
    assert plain.bytes is not None
    return replace(plain, make=make, bytes=plain.bytes - rows * k * plain.dtype.itemsize + held)
