"""Inputs of paged attention: mixed batches over shuffled blocks."""

from __future__ import annotations

from typing import Any

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import FP8, CacheScales, plain, stored
from kernels.registry import Case
from kernels.testing import TOLERANCES, randn

SeqShape = tuple[int, int]


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[SeqShape],
    h: int,
    g: int,
    d: int,
    dv: int | None = None,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    bound: int | None = None,
    strided: bool = False,
    dirty: bool = False,
    scales: tuple[float, float] | None = None,
    small: bool = True,
) -> Case:
    """`seqs` are (queries, context), those of one query first. `bound` is the host's max_context if not the true one.

    `strided` lays the caches out as two layers of one page-first pool. `dirty`: what stands past the contexts is NaN.
    `scales` of keys and values: the caches are 8-bit ones.
    """
    value_dim = dv or d
    num_single = next((i for i, (queries, _) in enumerate(seqs) if queries != 1), len(seqs))
    longest = max(context for _, context in seqs)
    width = -(-max(longest, 1) // block_size) + 1

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        blocks = 1 + sum(-(-context // block_size) for _, context in seqs)
        order = torch.randperm(blocks - 1, generator=generator, device=generator.device).to(device) + 1
        table = torch.zeros(len(seqs), width, dtype=torch.int32, device=device)
        taken = 0
        for i, (_, context) in enumerate(seqs):
            used = -(-context // block_size)
            table[i, :used] = order[taken : taken + used]
            taken += used
        if strided:
            pool = randn(generator, device, dtype, blocks, 2, 2, g, block_size, d)
            k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
        else:
            k_cache = randn(generator, device, dtype, blocks, g, block_size, d)
            v_cache = randn(generator, device, dtype, blocks, g, block_size, value_dim)
        if dirty:
            held = torch.zeros(blocks * block_size, dtype=torch.bool, device=device)
            for i, (_, context) in enumerate(seqs):
                place = torch.arange(context, device=device)
                held[table[i, place // block_size].long() * block_size + place % block_size] = True
            for cache in (k_cache, v_cache):
                cache.transpose(1, 2)[~held.view(blocks, block_size)] = float("nan")
        if scales is not None:
            k_cache, v_cache = fp8_scale(k_cache, v_cache, scales, strided)
        starts = [0]
        for queries, _ in seqs:
            starts.append(starts[-1] + queries)
        return {
            "q": randn(generator, device, dtype, starts[-1], h, d, scale=2.0),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": table,
            "batch": AttentionBatch(
                torch.tensor(starts, dtype=torch.int32, device=device),
                torch.tensor([context for _, context in seqs], dtype=torch.int32, device=device),
                num_single,
                max(queries for queries, _ in seqs),
                bound or longest,
                sum(context for _, context in seqs[num_single:]),
            ),
            "scale": d**-0.5,
            "window": window,
            "softcap": softcap,
            "sinks": randn(generator, device, dtype, h) if sinks else None,
            **({} if scales is None else {"scales": CacheScales(*scales)}),
        }

    pairs = read = 0
    for queries, context in seqs:
        if not context:
            continue
        first = 0 if window is None else max(0, context - queries - window + 1)
        read += context - first
        seen = [min(p + 1, window or p + 1) for p in range(context - queries, context)]
        pairs += sum(seen)
    tokens = sum(queries for queries, _ in seqs)
    return Case(
        name,
        dtype,
        make,
        TOLERANCES[dtype],
        bytes=read * g * (d + value_dim) * (dtype.itemsize if scales is None else 1)
        + tokens * h * (d + value_dim) * dtype.itemsize,
        flops=2 * pairs * h * (d + value_dim),
        small=small,
    )


def fp8_scale(
    k_cache: torch.Tensor, v_cache: torch.Tensor, scales: tuple[float, float], strided: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches as 8-bit ones over `scales`; `strided` as in `case`."""
    k, v = (stored(cache, scale, FP8) for cache, scale in zip((k_cache, v_cache), scales, strict=True))
    if not strided:
        return k, v
    pool = torch.stack((plain(k), plain(v)), dim=1)[:, None].repeat(1, 2, 1, 1, 1, 1).view(FP8)
    return pool[:, 1, 0], pool[:, 1, 1]


def cases() -> list[Case]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += [
            case("1 single 4/2x64", dtype, [(1, 1)], 4, 2, 64),
            case("singles, one padding, 8/2x64", dtype, [(1, 65), (1, 0), (1, 200)], 8, 2, 64, bound=1000),
            case("1 single split 32/8x128", dtype, [(1, 700)], 32, 8, 128, strided=True),
            case(
                "singles of very different length, window",
                dtype,
                [(1, 900), (1, 3), (1, 0), (1, 70), (1, 410)],
                8,
                2,
                64,
                window=610,
                bound=20000,
            ),
            case("mixed, 3 heads a group, x80", dtype, [(1, 33), (3, 3), (40, 100), (7, 0)], 6, 2, 80),
            case(
                "mixed, window, softcap, sinks, block 32",
                dtype,
                [(1, 63), (1, 130), (9, 9), (63, 123)],
                5,
                1,
                64,
                block_size=32,
                window=21,
                softcap=30.0,
                sinks=True,
            ),
            case("split queries, sinks, 96 by 64", dtype, [(3, 300)], 10, 2, 96, 64, sinks=True),
            case(
                "mixed, window, 4/1x256, block 128", dtype, [(1, 300), (9, 140)], 4, 1, 256, block_size=128, window=100
            ),
            case("one line of 123, multi-head x16", dtype, [(123, 123)], 2, 2, 16),
            case(
                "8 bits, mixed, 3 heads a group, x80",
                dtype,
                [(1, 33), (1, 0), (3, 3), (40, 100)],
                6,
                2,
                80,
                scales=(0.03, 0.2),
            ),
            case(
                "8 bits, split, window, softcap, sinks, 96 by 64",
                dtype,
                [(1, 700), (3, 300)],
                10,
                2,
                96,
                64,
                window=310,
                softcap=30.0,
                sinks=True,
                scales=(0.5, 2.0),
            ),
            case(
                "prompts, 3 heads a group, block 32",
                dtype,
                [(1, 40), (130, 130), (70, 333), (5, 0), (129, 200)],
                6,
                2,
                128,
                block_size=32,
                strided=True,
                dirty=True,
            ),
            case(
                "prompt behind a prefix, softcap, sinks",
                dtype,
                [(333, 410)],
                4,
                4,
                64,
                softcap=30.0,
                sinks=True,
                dirty=True,
            ),
        ]
        few = [(1, 65), (1, 300), (4, 200), (3, 3), (4, 0), (2, 700)]
        made += [
            case("entries of few queries, padding", dtype, few, 8, 2, 64, bound=1000),
            case("entries of few queries, window, sinks", dtype, few[2:], 4, 1, 64, window=333, sinks=True, bound=9000),
        ]
    qwen: dict[str, Any] = {"h": 32, "g": 8, "d": 128, "strided": True, "small": False}
    for batch, context in ((1, 384), (1, 16384), (8, 1100), (64, 1100), (256, 1100), (256, 384)):
        name = f"Qwen3-4B decode {batch} x {context}"
        made.append(case(name, torch.bfloat16, [(1, context)] * batch, **qwen))
    for batch, context in ((1, 1100), (8, 1100), (64, 1100)):
        made.append(case(f"Qwen3-8B {batch} x 4 of {context}", torch.bfloat16, [(4, context)] * batch, **qwen))
    wide: dict[str, Any] = {**qwen, "h": 64, "bound": 20480}
    made.append(case("Qwen3-32B 5 x 3, one of 16384", torch.bfloat16, [(3, 900)] * 4 + [(3, 16384)], **wide))
    # Sequences that stream: nearly equal, and of any length with padding among them.
    for g, name in ((4, "Qwen3-30B-A3B"), (8, "Llama-3.1-8B")):
        heads: dict[str, Any] = {**qwen, "g": g, "dirty": True}
        even = [(1, 1024 + 2 * i) for i in range(64)]
        made.append(case(f"{name} decode 64 x 1024 to 1150", torch.bfloat16, even, **heads))
        uneven = [(1, 37 * i % 2048) for i in range(63)] + [(1, 16384)]
        made.append(case(f"{name} decode 64, padding, one of 16384", torch.bfloat16, uneven, **heads, bound=20480))
        eighth: dict[str, Any] = {**heads, "scales": (0.05, 0.4)}
        made.append(case(f"8 bits, {name} decode 64 x 1024 to 1150", torch.bfloat16, even, **eighth))
        made.append(case(f"8 bits, {name} decode 64, padding", torch.bfloat16, uneven, **eighth, bound=20480))
    eighth = {**qwen, "dirty": True, "scales": (0.05, 0.4)}
    for batch, context in ((1, 16384), (8, 1100), (64, 4096), (256, 1100)):
        name = f"8 bits, Qwen3-8B decode {batch} x {context}"
        made.append(case(name, torch.bfloat16, [(1, context)] * batch, **eighth))
    for seqs in ([(1024, 1024)], [(2048, 16384)], [(1, 1100)] * 64 + [(1024, 1024), (900, 2000)]):
        made.append(case(f"8 bits, Qwen3-8B {len(seqs)} lines, {seqs[-1]}", torch.bfloat16, seqs, **eighth))
    skewed = [(1, 300)] * 31 + [(1, 30000)]
    made.append(case("Qwen3-4B decode 31 x 300, 1 x 30000", torch.bfloat16, skewed, **qwen))
    for queries, context in ((128, 128), (1024, 1024), (2048, 16384), (16384, 16384), (8, 16384)):
        name = f"Qwen3-4B prefill {queries} of {context}"
        made.append(case(name, torch.bfloat16, [(queries, context)], **qwen))
    made.append(case("Qwen3-4B prefill 8 x 1024", torch.bfloat16, [(1024, 1024)] * 8, **qwen))
    ragged = [(1500, 1500), (900, 900), (700, 1700), (1300, 1300), (1024, 1024), (600, 600), (1100, 1103), (1068, 1068)]
    made.append(case("Qwen3-4B prefill ragged, 8192", torch.bfloat16, ragged, **qwen))
    mixed = [(1, 1100)] * 64 + [(1024, 1024), (900, 2000)]
    made.append(case("Qwen3-4B mixed 64 x 1, 1024, 900", torch.bfloat16, mixed, **qwen))
    made.append(case("Gemma3-1B window decode", torch.bfloat16, [(1, 4000)] * 16, 4, 1, 256, window=512, small=False))
    return made
