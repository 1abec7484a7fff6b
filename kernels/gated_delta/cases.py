"""Cases of the gated delta rule."""

from __future__ import annotations

from typing import Any

import torch

from kernels.mixed import mixed
from kernels.registry import Case, Tolerance
from kernels.testing import TOLERANCES, deterministic, randn

# A chunk solves a system of its keys: both sides do so in float32, in another order.
FLOAT32 = Tolerance(max_rel=3e-5, rms=1e-5)


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
    states_only: bool = False,
) -> Case:
    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs)
        t = batch.num_tokens
        slots = torch.randperm(len(seqs) + 1, generator=g, device=g.device)[: len(seqs)] + 1
        return {
            "qkv": randn(g, device, dtype, t, 2 * key_heads * dk + heads * dv),
            "a": randn(g, device, dtype, t, heads + 3)[:, :heads],
            "b": randn(g, device, dtype, t, heads + 3)[:, 3:],
            "a_log": randn(g, device, torch.float32, heads),
            "dt_bias": randn(g, device, torch.float32, heads),
            "state": randn(g, device, torch.float32, len(seqs) + 2, heads, dk, dv),
            "state_slots": slots.to(device),
            "batch": batch.keeping(kept),
            "num_key_heads": key_heads,
            "states_only": states_only,
        }

    computed = kept if kept is not None and states_only else [count for count, _ in seqs]
    tokens, given = sum(computed), 0 if states_only else heads * dv
    read, written = (sum(count > 0 for count in counts) for counts in (computed, computed if kept is None else kept))
    states = 4 * (read + written) * heads * dk * dv
    moved = states + dtype.itemsize * tokens * (2 * key_heads * dk + heads * dv + given + 2 * heads)
    tolerance = FLOAT32 if dtype == torch.float32 else TOLERANCES[dtype]
    return Case(name, dtype, make, tolerance, moved, 6 * tokens * heads * dk * dv, mutated=("state",), small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    real = (16, 32, 128, 128)
    drafted = [(1, 9), (2, 7), (5, 5), (5, 40), (70, 71)]
    made = [
        case("decode, one head a key head", f32, [(1, 1), (1, 30)], 2, 2, 16, 16),
        case("decode, odd sizes", f32, [(1, 5), (1, 2), (1, 1)], 1, 3, 24, 20),
        case("mixed lines", f32, [(1, 9), (3, 3), (5, 40), (32, 32), (45, 60)], 2, 4, 16, 24),
        case("lines past a chunk", f32, [(1, 9), (64, 64), (65, 70), (150, 150), (17, 300)], 1, 2, 24, 20),
        case("drafts", f32, drafted, 1, 2, 24, 20, kept=[0, 2, 3, 0, 65]),
        case("drafts that stood", f32, drafted, 1, 2, 24, 20, True, [1, 2, 3, 0, 65], True),
        case("mixed lines, bfloat16", bf16, [(1, 9), (40, 70), (130, 130)], 1, 2, 32, 32),
        case("1 line, 32 heads of 128 x 128", bf16, [(1, 1024)], *real, small=False),
        case("64 lines, 32 heads of 128 x 128", bf16, [(1, 1024)] * 64, *real, small=False),
        case("3 drafts, 1 line, 32 heads of 128 x 128", bf16, [(4, 1024)], *real, False, [0]),
        case("3 drafts, 64 lines, 32 heads of 128 x 128", bf16, [(4, 1024)] * 64, *real, False, [0] * 64),
        case("3 of 3 stood, 64 lines, 32 heads of 128 x 128", bf16, [(4, 1024)] * 64, *real, False, [4] * 64, True),
        case("one chunk of 4096, 32 heads of 128 x 128", bf16, [(4096, 4096)], *real, small=False),
    ]
    return made + deterministic(made, "decode, odd sizes", "mixed lines", "mixed lines, bfloat16")
