"""Inputs of rope and KV write."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cache_scales import CacheScales
from kernels.paged_attention.cases import fp8_scale
from kernels.registry import Case
from kernels.rope import Rope
from kernels.testing import TOLERANCES, deterministic, randint, randn


def case(
    name: str,
    dtype: torch.dtype,
    t: int,
    h: int,
    g: int,
    d: int,
    rotary: int | None = None,
    block_size: int = 16,
    qk_norm: bool = False,
    interleaved: bool = False,
    padding: int = 0,
    strided: bool = False,
    scales: tuple[float, float] | None = None,
    small: bool = True,
) -> Case:
    """`padding` tokens have no slot; `strided` lays the caches out as two layers of one page-first pool.
    `scales` of keys and values: the caches are 8-bit ones."""
    r = rotary or d

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        blocks = t // block_size + 3
        slots = torch.randperm(blocks * block_size, generator=generator, device=generator.device)[:t].to(device)
        slots[t - padding :] = -1
        turns = torch.arange(64, device=device).float()[:, None] * torch.logspace(0, -3, r // 2, device=device)
        if strided:
            pool = randn(generator, device, dtype, blocks, 2, 2, g, block_size, d)
            k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
        else:
            k_cache = randn(generator, device, dtype, blocks, g, block_size, d)
            v_cache = randn(generator, device, dtype, blocks, g, block_size, d)
        if scales is not None:
            k_cache, v_cache = fp8_scale(k_cache, v_cache, scales, strided)
        return {
            "qkv": randn(generator, device, dtype, t, (h + 2 * g) * d),
            "positions": randint(generator, device, 0, 64, t),
            "slots": slots,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "num_heads": h,
            "rope": Rope(
                torch.cat((turns.cos(), turns.sin()), dim=1),
                randn(generator, device, dtype, d) if qk_norm else None,
                randn(generator, device, dtype, d) if qk_norm else None,
                offset=1.0 if interleaved else 0.0,
                interleaved=interleaved,
            ),
            **({} if scales is None else {"scales": CacheScales(*scales)}),
        }

    channels = (h + 2 * g) * d
    return Case(
        name,
        dtype,
        make,
        TOLERANCES[dtype],
        bytes=t * (2 * channels * dtype.itemsize + 4 * r + 12),
        flops=6 * t * channels,
        mutated=("k_cache", "v_cache"),
        small=small,
    )


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [
            case("T1 8/2x64", dtype, 1, 8, 2, 64),
            case("T3 6/1x96 qk-norm, padding", dtype, 3, 6, 1, 96, qk_norm=True, padding=1),
            case("T63 4/4x80 partial, interleaved", dtype, 63, 4, 4, 80, rotary=32, interleaved=True),
            case("T13 5/1x16 interleaved, qk-norm", dtype, 13, 5, 1, 16, interleaved=True, qk_norm=True),
            case("T19 3/1x64 partial, all padding", dtype, 19, 3, 1, 64, rotary=16, padding=19),
            case("T5 4/2x256 page-first, block 64", dtype, 5, 4, 2, 256, block_size=64, strided=True, qk_norm=True),
            case("8 bits, T3 6/1x96 qk-norm, padding", dtype, 3, 6, 1, 96, qk_norm=True, padding=1, scales=(0.02, 0.1)),
            case("8 bits, T63 4/4x80 partial", dtype, 63, 4, 4, 80, rotary=32, interleaved=True, scales=(1e-3, 1e-4)),
            case("8 bits, T5 4/2x256 page-first", dtype, 5, 4, 2, 256, block_size=64, strided=True, scales=(1.0, 1.0)),
        ]
    made.append(case("no tokens", torch.float32, 0, 4, 2, 64))
    for t in (1, 64, 8192):
        made.append(case(f"T{t} Qwen3-4B", torch.bfloat16, t, 32, 8, 128, qk_norm=True, strided=True, small=False))
    for t in (1, 64, 8192):
        eighth: dict[str, Any] = {"qk_norm": True, "strided": True, "scales": (0.05, 0.05), "small": False}
        made.append(case(f"8 bits, T{t} Qwen3-8B", torch.bfloat16, t, 32, 8, 128, **eighth))
    return made + deterministic(made, "T3 6/1x96 qk-norm, padding", "T8192 Qwen3-4B", "8 bits, T8192 Qwen3-8B")
