"""Cases of the causal convolution."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import mixed
from kernels.registry import Case
from kernels.testing import TOLERANCES, deterministic, randn


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[tuple[int, int]],
    channels: int,
    width: int = 4,
    small: bool = True,
    taken_back: int = 0,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs)
        slots = torch.randperm(len(seqs) + 1, generator=g, device=g.device)[: len(seqs)] + 1
        return {
            # Inputs stand beside other columns of a projection.
            "x": randn(g, device, dtype, batch.num_tokens, channels + 8)[:, :channels],
            "weight": randn(g, device, dtype, channels, width),
            "state": randn(g, device, dtype, len(seqs) + 2, width + taken_back, channels),
            "state_slots": slots.to(device),
            "batch": batch.attention,
        }

    tokens = sum(count for count, _ in seqs)
    moved = dtype.itemsize * channels * (2 * tokens + width + 2 * len(seqs) * (width - 1))
    return Case(
        name, dtype, make, TOLERANCES[dtype], moved, 2 * tokens * channels * width, mutated=("state",), small=small
    )


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        case("decode", f32, [(1, 1), (1, 2), (1, 9)], 37),
        case("mixed lines, shorter than the filter and longer", f32, [(1, 5), (2, 2), (2, 7), (11, 11), (19, 30)], 24),
        case("a line that begins within the filter", f32, [(1, 2), (1, 3), (2, 4), (3, 5), (70, 71)], 600),
        case("drafts", f32, [(1, 1), (1, 9), (2, 7), (5, 5), (5, 30), (19, 30)], 24, taken_back=3),
        case("two taps, bfloat16", bf16, [(1, 4), (5, 9)], 40, width=2),
        case("64 lines, 8192 channels", bf16, [(1, 1024)] * 64, 8192, small=False),
        case("one chunk of 4096, 8192 channels", bf16, [(4096, 4096)], 8192, small=False),
    ]
    return made + deterministic(made, "decode", "mixed lines, shorter than the filter and longer", "two taps, bfloat16")
