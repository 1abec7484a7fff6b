"""Cases of attention over a latent cache."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import kept, mixed
from kernels.registry import Case
from kernels.testing import TOLERANCES, randn

DECODE = [(1, 1), (1, 17), (1, 48)]


def _case(
    name: str,
    dtype: torch.dtype,
    lines: list[tuple[int, int]],
    heads: int,
    latent: int,
    rope: int,
    small: bool = True,
    block_size: int = 16,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, lines, block_size)
        return {
            "q": randn(g, device, dtype, batch.num_tokens, heads, latent),
            "q_rope": randn(g, device, dtype, batch.num_tokens, heads, rope),
            "cache": kept(device, g, dtype, batch, block_size, latent + rope, batch.contexts),
            "block_table": batch.block_table,
            "query_start": batch.query_start,
            "context_len": batch.context_len,
            "scale": (latent + rope) ** -0.5,
            **batch.bounds(),
        }

    tokens, entries = sum(count for count, _ in lines), sum(length for _, length in lines)
    pairs = sum(count * (2 * length - count + 1) // 2 for count, length in lines)
    moved = dtype.itemsize * (entries * (latent + rope) + tokens * heads * (2 * latent + rope))
    flops = 2 * pairs * heads * (2 * latent + rope)
    return Case(name, dtype, make, TOLERANCES[dtype], moved, flops, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        _case("decode, odd heads", f32, DECODE, 3, 32, 16),
        _case("decode, split along the context", f32, [(1, 300)], 2, 16, 8, block_size=32),
        _case("mixed lines", f32, [*DECODE, (5, 5), (7, 40)], 5, 32, 16),
        _case("mixed lines, bfloat16", bf16, [(1, 33), (9, 20)], 16, 64, 16),
        _case("many heads", bf16, [(1, 20), (3, 18)], 80, 16, 16),
        _case("1 line of 4096, 16 heads", bf16, [(1, 4096)], 16, 512, 64, small=False, block_size=64),
        _case("64 lines of 1024, 16 heads", bf16, [(1, 1024)] * 64, 16, 512, 64, small=False, block_size=64),
        _case("64 lines of 1024, 64 heads", bf16, [(1, 1024)] * 64, 64, 512, 64, small=False, block_size=64),
        _case("one chunk of 2048, 16 heads", bf16, [(2048, 2048)], 16, 512, 64, small=False, block_size=64),
    ]
