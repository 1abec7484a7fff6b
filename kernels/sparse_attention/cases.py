"""Cases of attention over a window and compressed entries."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import cos_sin, kept, mixed
from kernels.registry import Case
from kernels.testing import TOLERANCES, deterministic, randn


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[tuple[int, int]],
    heads: int,
    dim: int,
    rope: int,
    window: int,
    block_size: int,
    ratio: int = 0,
    chosen: int = 0,
    small: bool = True,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs, block_size)
        made: dict[str, Any] = {
            "q": randn(g, device, dtype, batch.num_tokens, heads, dim),
            "cache": kept(device, g, dtype, batch, block_size, dim, batch.contexts),
            "block_table": batch.block_table,
            "batch": batch.attention,
            "positions": batch.positions,
            "cos_sin": cos_sin(device, max(batch.contexts), rope),
            "sinks": randn(g, device, torch.float32, heads),
            "scale": dim**-0.5,
            "window": window,
        }
        if ratio:
            known = [length // ratio for length in batch.contexts]
            made["entries"] = kept(device, g, dtype, batch, block_size // ratio, dim, known)
            made["entry_table"] = batch.block_table
            made["ratio"] = ratio
        if chosen:
            most = max(max(batch.contexts) // ratio, chosen)
            ready = (batch.positions.long() + 1) // ratio
            order = torch.rand(batch.num_tokens, most, generator=g, device=g.device).to(device).argsort(dim=-1)
            order = order[:, :chosen]
            kept_first = torch.where(order < ready[:, None], order, -1)
            made["chosen"] = kept_first.sort(dim=-1, descending=True).values.int()
        return made

    tokens = sum(count for count, _ in seqs)
    extra = [min(chosen or length, length // ratio) if ratio else 0 for _, length in seqs]
    read = sum(min(length, window + count) + more for (count, length), more in zip(seqs, extra, strict=True))
    pairs = sum(count * (min(length, window) + more) for (count, length), more in zip(seqs, extra, strict=True))
    moved = dtype.itemsize * dim * (read + 2 * tokens * heads)
    return Case(name, dtype, make, TOLERANCES[dtype], moved, 4 * pairs * heads * dim, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    seqs = [(1, 1), (1, 30), (1, 64), (5, 5), (7, 50)]
    few, many = [(1, 4096)], [(1, 4096)] * 64
    flash = (64, 512, 64, 128, 128)
    made = [
        case("window alone", f32, seqs, 3, 24, 8, 12, 16),
        case("every entry", f32, seqs, 4, 32, 16, 12, 16, ratio=16),
        case("chosen entries", f32, seqs, 4, 32, 16, 12, 16, ratio=4, chosen=6),
        case("chosen entries, bfloat16", bf16, [(1, 40), (3, 20)], 20, 32, 16, 8, 16, ratio=4, chosen=5),
        case("one line, a tile a program", f32, [(1, 60)], 3, 24, 8, 12, 16, ratio=4, chosen=6),
        case("one line, fewer entries than are chosen", f32, [(1, 22)], 5, 32, 16, 12, 16, ratio=4, chosen=70),
        case("one line, many tiles a program", bf16, [(1, 1300)], 3, 24, 8, 20, 16, ratio=4),
        case("lines with and without tiles for each split", f32, [(1, 5000), (1, 3)], 3, 24, 8, 12, 16, ratio=4),
        case("1 line of 512, 512 of ratio 4", bf16, [(1, 512)], *flash, ratio=4, chosen=512, small=False),
        case("1 line of 4096, ratio 128", bf16, few, *flash, ratio=128, small=False),
        case("1 line of 4096, 512 of ratio 4", bf16, few, *flash, ratio=4, chosen=512, small=False),
        case("1 line of 4096, every entry of ratio 4", bf16, few, *flash, ratio=4, small=False),
        case("8 lines of 4096, 512 of ratio 4", bf16, few * 8, *flash, ratio=4, chosen=512, small=False),
        case("16 lines of 512, 512 of ratio 4", bf16, [(1, 512)] * 16, *flash, ratio=4, chosen=512, small=False),
        case("16 lines of 4096, 512 of ratio 4", bf16, few * 16, *flash, ratio=4, chosen=512, small=False),
        case("64 lines of 4096, window", bf16, many, *flash, small=False),
        case("64 lines of 4096, ratio 128", bf16, many, *flash, ratio=128, small=False),
        case("64 lines of 4096, 512 of ratio 4", bf16, many, *flash, ratio=4, chosen=512, small=False),
    ]
    return made + deterministic(made, "window alone", "every entry", "chosen entries, bfloat16")
