"""Words in the three layouts, with and without an order of inputs."""

from __future__ import annotations

from typing import Any

import torch

from kernels.registry import Case
from kernels.repack.reference import Stored
from kernels.sizes import cdiv
from kernels.testing import EXACT, randint


def case(
    name: str,
    layout: Stored,
    n: int,
    k: int,
    bits: int = 4,
    ordered: bool = False,
    apart: int = 0,
    small: bool = True,
    more: int = 0,
) -> Case:
    """k inputs of n outputs, in words whose rows stand `apart` words further on than they have to. more: inputs in an
    order that come twice, or more often."""
    width = cdiv(k * bits, 32)
    rows, columns = {"gptq": (width, n), "awq": (k, cdiv(n * bits, 32)), "pack-quantized": (n, width)}[layout]

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {
            "words": randint(generator, device, -(1 << 31), 1 << 31, rows, columns + apart)[:, :columns],
            "layout": layout,
            "bits": bits,
            "outputs": n,
        }
        if ordered:
            places = torch.randperm(k, generator=generator, device=generator.device).to(device)
            again = randint(generator, device, 0, k, more, dtype=torch.int64)
            made["places"] = torch.cat((again, places))
        return made

    moved = 4 * (rows * columns + n * cdiv((k + more) * bits, 32)) + 8 * (k + more) * ordered
    return Case(name, torch.int32, make, EXACT, bytes=moved, flops=0, small=small)


def cases() -> list[Case]:
    made = [
        case("awq", "awq", 24, 64),
        case("awq, 37 outputs of 100 inputs", "awq", 37, 100),
        case("awq, several tiles", "awq", 301, 307, apart=3),
        case("awq, one input", "awq", 1, 1),
        case("gptq", "gptq", 40, 96),
        case("gptq, several tiles, 8 bits", "gptq", 67, 293, 8, apart=5),
        case("gptq in an order", "gptq", 40, 96, ordered=True),
        case("gptq in an order, 67 outputs of 531 inputs", "gptq", 67, 531, ordered=True, apart=5),
        case("gptq in an order, 8 bits", "gptq", 35, 131, 8, ordered=True),
        case("gptq in an order, some inputs again", "gptq", 67, 131, ordered=True, apart=5, more=53),
        case("pack-quantized", "pack-quantized", 35, 300, apart=1),
        case("pack-quantized in an order, some inputs again", "pack-quantized", 35, 131, 8, ordered=True, more=53),
        case("pack-quantized in an order", "pack-quantized", 40, 96, ordered=True),
        case("pack-quantized in an order, 67 outputs of 531 inputs", "pack-quantized", 67, 531, ordered=True, apart=3),
        case("pack-quantized in an order, 8 bits", "pack-quantized", 35, 131, 8, ordered=True),
    ]
    real = [
        case(f"{layout}, 12,288 outputs of 4,096 inputs", layout, 12288, 4096, ordered=layout != "awq", small=False)
        for layout in ("awq", "gptq", "pack-quantized")
    ]
    return [*made, *real, case("gptq as it stands, 12,288 outputs", "gptq", 12288, 4096, small=False)]
