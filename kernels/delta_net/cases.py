"""Cases of Gated DeltaNet."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import mixed
from kernels.registry import Case, Tolerance
from kernels.testing import TOLERANCES, deterministic, randn

FLOAT32 = Tolerance(max_rel=3e-5, rms=1e-5)  # as the delta rule's
WIDTH = 4


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[tuple[int, int]],
    key_heads: int,
    heads: int,
    dk: int,
    dv: int,
    small: bool = True,
    kept: list[int] | None = None,
    taken_back: int = 0,
) -> Case:
    channels, values = 2 * key_heads * dk + heads * dv, heads * dv

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs)
        slots = torch.randperm(len(seqs) + 1, generator=g, device=g.device)[: len(seqs)] + 1
        both = randn(g, device, dtype, batch.num_tokens, channels + values + 2 * heads)
        x, z, b, a = both.split((channels, values, heads, heads), dim=-1)
        return {
            "x": x,
            "z": z,
            "a": a,
            "b": b,
            "conv_weight": randn(g, device, dtype, channels, WIDTH, scale=0.5),
            "conv_state": randn(g, device, dtype, len(seqs) + 2, WIDTH + taken_back, channels),
            "a_log": randn(g, device, torch.float32, heads),
            "dt_bias": randn(g, device, torch.float32, heads),
            "state": randn(g, device, torch.float32, len(seqs) + 2, heads, dk, dv),
            "norm_weight": randn(g, device, dtype, dv),
            "eps": 1e-6,
            "state_slots": slots.to(device),
            "batch": batch.keeping(kept),
            "num_key_heads": key_heads,
        }

    tokens = sum(count for count, _ in seqs)
    states = len(seqs) * (8 * heads * dk * dv + WIDTH * channels * dtype.itemsize)
    moved = states + dtype.itemsize * (tokens * (channels + 2 * values + 2 * heads) + WIDTH * channels)
    flops = 6 * tokens * heads * dk * dv + 2 * WIDTH * tokens * channels
    tolerance = FLOAT32 if dtype == torch.float32 else TOLERANCES[dtype]
    return Case(name, dtype, make, tolerance, moved, flops, mutated=("conv_state", "state"), small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    real = (16, 32, 128, 128)
    made = [
        case("decode from the first tokens on", f32, [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 30)], 2, 4, 16, 16),
        case("mixed lines, odd sizes", f32, [(1, 9), (2, 2), (2, 3), (3, 40), (65, 66), (90, 130)], 1, 3, 24, 20),
        case("mixed lines, bfloat16", bf16, [(1, 9), (1, 1), (70, 70)], 1, 2, 32, 32),
        case(
            "drafts",
            f32,
            [(1, 1), (1, 9), (2, 7), (5, 5), (5, 30), (19, 30)],
            1,
            3,
            24,
            20,
            True,
            [1, 0, 2, 3, 0, 5],
            3,
        ),
        case("decode, places for drafts", f32, [(1, 1), (1, 2), (1, 5), (1, 30)], 2, 4, 16, 16, taken_back=3),
        case("float32, heads of 128 x 128", f32, [(1, 9), (1, 1), (70, 70), (130, 190)], 2, 4, 128, 128, small=False),
        case("1 line, 32 heads of 128 x 128", bf16, [(1, 1024)], *real, small=False),
        case("64 lines, 32 heads of 128 x 128", bf16, [(1, 1024)] * 64, *real, small=False),
        case("8 chunks of 1000 beside 64 lines", bf16, [(1, 1024)] * 64 + [(1000, 1000)] * 8, *real, small=False),
        case("one chunk of 4096, 32 heads of 128 x 128", bf16, [(4096, 4096)], *real, small=False),
    ]
    return made + deterministic(
        made, "mixed lines, odd sizes", "mixed lines, bfloat16", "8 chunks of 1000 beside 64 lines"
    )
