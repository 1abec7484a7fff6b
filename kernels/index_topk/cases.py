"""Cases of the indexer."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import kept, mixed
from kernels.registry import Case
from kernels.testing import EXACT, deterministic, randn


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[tuple[int, int]],
    heads: int,
    dim: int,
    ratio: int,
    top_k: int,
    block_size: int,
    small: bool = True,
    whole: bool = False,
) -> Case:
    """`whole` draws whole numbers, whose scores are exact however they are summed; many are equal."""

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs, block_size)
        known = [length // ratio for length in batch.contexts]
        made = {
            "q": randn(g, device, dtype, batch.num_tokens, heads, dim),
            "weights": randn(g, device, dtype, batch.num_tokens, heads),
            "cache": kept(device, g, dtype, batch, block_size // ratio, dim, known),
            "block_table": batch.block_table,
            "batch": batch.attention,
            "ratio": ratio,
            "top_k": top_k,
            "scale": (heads * dim) ** -0.5,
        }
        if whole:
            made.update(
                q=made["q"].round(), weights=made["weights"].round(), cache=made["cache"].round(), scale=2.0**-6
            )
        return made

    tokens = sum(count for count, _ in seqs)
    pairs = sum(count * length // ratio for count, length in seqs)
    entries = sum(length // ratio for _, length in seqs)
    moved = dtype.itemsize * (tokens * heads * (dim + 1) + entries * dim) + 4 * tokens * top_k
    return Case(name, dtype, make, EXACT, moved, 2 * pairs * heads * (dim + 1), small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    made = [
        case("fewer entries than places", f32, [(1, 3), (1, 9), (6, 6)], 3, 16, 4, 8, 16),
        case("more entries than places", f32, [(1, 40), (5, 64)], 4, 16, 4, 3, 16),
        case("no entry yet", f32, [(1, 1), (2, 2)], 2, 16, 4, 3, 16),
        case("equal scores", f32, [(1, 90), (3, 64)], 2, 16, 4, 5, 16, whole=True),
        case("more entries than are looked at at once", f32, [(1, 5000), (2, 9000)], 2, 16, 4, 7, 16, whole=True),
        case("64 lines of 4096, 512 kept", bf16, [(1, 4096)] * 64, 64, 128, 4, 512, 128, small=False, whole=True),
    ]
    return made + deterministic(made, "more entries than places")
