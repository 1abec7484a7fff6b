"""Cases of the key-value compressor."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import cos_sin, mixed
from kernels.registry import Case
from kernels.testing import TOLERANCES, deterministic, randn


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[tuple[int, int]],
    dim: int,
    ratio: int,
    overlap: bool,
    block_size: int,
    rope: int,
    small: bool = True,
    more: int = 0,
) -> Case:
    """more: places of the state beyond those of open windows."""
    windows = 2 if overlap else 1

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs, block_size)
        slots = torch.randperm(len(seqs) + 1, generator=g, device=g.device)[: len(seqs)] + 1
        channels = windows * dim
        both = randn(g, device, dtype, batch.num_tokens, 2 * channels)
        return {
            "kv": both[:, :channels],
            "gate": both[:, channels:],
            "bias": randn(g, device, torch.float32, ratio, channels),
            "norm": randn(g, device, torch.float32, dim),
            "cos_sin": cos_sin(device, max(batch.contexts), rope),
            "slots": batch.slots,
            "cache": torch.zeros(batch.num_blocks, block_size // ratio, dim, dtype=dtype, device=device),
            "state": randn(g, device, dtype, len(seqs) + 2, windows * ratio + more, 2, channels),
            "state_slots": slots.to(device),
            "batch": batch.attention,
            "ratio": ratio,
        }

    tokens = sum(count for count, _ in seqs)
    made = sum(length // ratio - (length - count) // ratio for count, length in seqs)
    moved = dtype.itemsize * (4 * tokens * windows * dim + made * dim)
    flops = 8 * made * windows * ratio * dim
    return Case(name, dtype, make, TOLERANCES[dtype], moved, flops, mutated=("cache", "state"), small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    seqs = [(1, 1), (1, 4), (1, 12), (2, 9), (3, 3), (9, 9), (11, 30)]
    made = [
        case("windows that overlap", f32, seqs, 24, 4, True, 16, 8),
        case("windows that do not", f32, seqs, 24, 8, False, 16, 8),
        case("room for three drafts", f32, seqs, 24, 4, True, 16, 8, more=3),
        case("one window a block, bfloat16", bf16, [(1, 16), (40, 50)], 32, 16, False, 16, 16),
        case("64 lines, ratio 4", bf16, [(1, 1024)] * 64, 512, 4, True, 128, 64, small=False),
        case("one chunk of 4096, ratio 4", bf16, [(4096, 4096)], 512, 4, True, 128, 64, small=False),
        case("one chunk of 4096, ratio 128", bf16, [(4096, 4096)], 512, 128, False, 128, 64, small=False),
    ]
    return made + deterministic(made, "windows that overlap", "one window a block, bfloat16")
