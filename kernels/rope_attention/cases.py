"""Inputs of rope, KV write and attention: mixed batches whose tokens are the last of their sequences."""

from __future__ import annotations

from typing import Any

import torch

from kernels.paged_attention.cases import SeqShape
from kernels.paged_attention.cases import case as attention_case
from kernels.registry import Case
from kernels.rope import Rope
from kernels.testing import TOLERANCES, randn


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[SeqShape],
    h: int,
    g: int,
    d: int,
    rotary: int | None = None,
    qk_norm: bool = False,
    interleaved: bool = False,
    fused: bool = True,
    small: bool = True,
    **attention: Any,
) -> Case:
    """`seqs` and `attention` as in the cases of paged attention; a sequence of context 0 is padding and has no slot."""
    r = rotary or d
    same = attention_case(name, dtype, seqs, h, g, d, small=small, **attention)

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        given = same.make(device, generator)
        block_size = given["k_cache"].shape[2]
        positions, slots = [], []
        table = given["block_table"].tolist()
        for seq, (queries, context) in enumerate(seqs):
            for position in range(context - queries, context):
                positions.append(max(position, 0))
                place = table[seq][position // block_size] * block_size + position % block_size
                slots.append(place if position >= 0 and context else -1)
        longest = max(context for _, context in seqs)
        turns = torch.arange(max(longest, 1), device=device).float()[:, None]
        turns = turns * torch.logspace(0, -3, r // 2, device=device)
        del given["q"]
        return {
            **given,
            "qkv": randn(generator, device, dtype, len(positions), (h + 2 * g) * d),
            "positions": torch.tensor(positions, dtype=torch.int32, device=device),
            "slots": torch.tensor(slots, dtype=torch.int64, device=device),
            "rope": Rope(
                torch.cat((turns.cos(), turns.sin()), dim=1),
                randn(generator, device, dtype, d) if qk_norm else None,
                randn(generator, device, dtype, d) if qk_norm else None,
                offset=1.0 if interleaved else 0.0,
                interleaved=interleaved,
            ),
            "fused": fused,
        }

    tokens = sum(queries for queries, _ in seqs)
    written = tokens * (2 * (h + 2 * g) * d * dtype.itemsize + 4 * r + 12)
    return Case(
        name,
        dtype,
        make,
        TOLERANCES[dtype],
        bytes=same.bytes - 2 * tokens * h * d * dtype.itemsize + written,
        flops=same.flops + 6 * tokens * (h + 2 * g) * d,
        mutated=("k_cache", "v_cache"),
        small=small,
    )


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [
            case("1 single, no past, 4/2x64", dtype, [(1, 1)], 4, 2, 64),
            case("singles, one padding, qk-norm, 8/2x64", dtype, [(1, 65), (1, 0), (1, 200)], 8, 2, 64, qk_norm=True),
            case("1 single split 32/8x128", dtype, [(1, 700)], 32, 8, 128, qk_norm=True, strided=True, bound=1000),
            case("a tile's edges", dtype, [(1, n) for n in (32, 33, 65, 129)], 4, 4, 32),
            case("more than are fused", dtype, [(1, n) for n in (32, 1, 34, 64, 65, 3)], 4, 2, 32, qk_norm=True),
            case("mixed, 3 heads a group, partial", dtype, [(1, 33), (1, 90), (3, 3), (40, 100)], 6, 2, 80, rotary=32),
            case(
                "window, softcap, interleaved, block 32",
                dtype,
                [(1, 63), (1, 130), (1, 2), (1, 21), (9, 9)],
                5,
                1,
                64,
                interleaved=True,
                qk_norm=True,
                block_size=32,
                window=21,
                softcap=30.0,
            ),
            case("window split, 4/1x256, block 128", dtype, [(1, 300)], 4, 1, 256, block_size=128, window=200),
            case("sinks, window", dtype, [(1, 65), (1, 1), (9, 30)], 8, 2, 64, window=21, sinks=True),
            case("1 single, sinks", dtype, [(1, 300)], 8, 2, 64, sinks=True),
            case("20 heads a group", dtype, [(1, 40), (1, 77)], 20, 1, 64),
            case(
                "8 bits, 1 single split", dtype, [(1, 700)], 32, 8, 128, qk_norm=True, strided=True, scales=(0.1, 0.2)
            ),
            case("8 bits, no past", dtype, [(1, 1)], 4, 2, 64, scales=(1.0, 1.0)),
            case("8 bits, beyond the largest", dtype, [(1, 40), (1, 1), (9, 30)], 4, 2, 64, scales=(1e-3, 1e-4)),
            case(
                "8 bits, mixed, partial, window",
                dtype,
                [(1, 33), (1, 0), (1, 90), (3, 3), (40, 100)],
                6,
                2,
                80,
                rotary=32,
                window=21,
                scales=(0.02, 0.05),
            ),
            case("not fused", dtype, [(1, 65), (7, 30)], 8, 2, 64, qk_norm=True, fused=False),
        ]
    qwen: dict[str, Any] = {"h": 32, "g": 8, "d": 128, "qk_norm": True, "strided": True, "small": False}
    for batch, context in ((1, 384), (1, 16384), (8, 1100), (64, 1100), (256, 1100), (256, 384)):
        name = f"Qwen3-4B decode {batch} x {context}"
        made.append(case(name, torch.bfloat16, [(1, context)] * batch, **qwen))
    made.append(case("Qwen3-4B mixed 64 x 1, 1024", torch.bfloat16, [(1, 1100)] * 64 + [(1024, 1024)], **qwen))
    eighth: dict[str, Any] = {**qwen, "scales": (0.05, 0.05)}
    for batch, context in ((1, 384), (1, 16384), (8, 1100), (64, 1100)):
        name = f"8 bits, Qwen3-8B decode {batch} x {context}"
        made.append(case(name, torch.bfloat16, [(1, context)] * batch, **eighth))
    llama = {**qwen, "qk_norm": False}
    made.append(case("Llama-3.1-8B decode 1 x 384", torch.bfloat16, [(1, 384)], **llama))
    return made
