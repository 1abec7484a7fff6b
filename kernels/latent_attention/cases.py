"""Cases of attention over a latent cache."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cache_scales import FP8, stored
from kernels.latent_write.reference import latent_write
from kernels.mixed import kept, mixed
from kernels.registry import Case, Tolerance
from kernels.testing import TOLERANCES, deterministic, randn

DECODE = [(1, 1), (1, 17), (1, 48)]
# Three roundings stand between the reference's float32 and a kernel: of the query or the keys, of the weights and of
# what goes through the up-projection of values.
BF16 = Tolerance(max_rel=1.6e-2, rms=1.2e-2)


def case(
    name: str,
    dtype: torch.dtype,
    seqs: list[tuple[int, int]],
    heads: int,
    latent: int,
    rope: int,
    nope: int,
    small: bool = True,
    block_size: int = 16,
    expanded: bool = False,
    fp8_scale: float | None = None,
) -> Case:
    """fp8_scale: the scale of latents in a cache of 8-bit floats. expanded: sequences of several queries get no
    absorbed queries, and a bound on their entries with room to spare."""
    singles = sum(count == 1 for count, _ in seqs)
    tokens, entries = sum(count for count, _ in seqs), sum(length for _, length in seqs)
    taken = singles if expanded else tokens

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        batch = mixed(device, g, seqs, block_size)
        q = randn(g, device, dtype, tokens, heads * (nope + rope) + 16)[:, 16:].unflatten(1, (heads, nope + rope))
        kv_up = randn(g, device, dtype, heads, 2 * nope, latent, scale=latent**-0.5)
        # the other inputs of the write are of no account
        table = torch.tensor([[1.0] * (rope // 2) + [0.0] * (rope // 2)], device=device)
        nothing = torch.full((tokens,), -1, device=device)
        entry = torch.zeros(tokens, latent + rope, dtype=dtype, device=device)
        cache = kept(device, g, dtype, batch, block_size, latent + rope, batch.contexts)
        absorbed = latent_write(
            q, entry, kv_up, 0 * nothing, nothing, table, cache, torch.ones(latent, device=device), taken
        )
        views: dict[str, Any] = {"cache": cache}
        if fp8_scale is not None:
            latents, keys = (cache[..., :latent] * 3).to(dtype), cache[..., latent:].contiguous()
            views = {"cache": stored(latents, fp8_scale, FP8), "keys": keys, "latent_scale": fp8_scale}
        return {
            "q": q,
            "absorbed": absorbed,
            "kv_up": kv_up,
            **views,
            "block_table": batch.block_table,
            "batch": batch.attention,
            "scale": (nope + rope) ** -0.5,
            "max_total_context": sum(length for _, length in seqs[singles:]) + 300 if expanded else 0,
        }

    pairs = sum(count * (2 * length - count + 1) // 2 for count, length in seqs)
    held = entries * (latent + rope) + heads * 2 * nope * latent + tokens * heads * nope
    if expanded:
        flops = 2 * heads * (pairs * (2 * nope + rope) + entries * 2 * nope * latent)
        held += tokens * heads * (nope + rope)
    else:
        flops = 2 * heads * (pairs * (2 * latent + rope) + tokens * nope * latent)
        held += tokens * heads * (latent + rope)
    tolerance = TOLERANCES[dtype] if dtype == torch.float32 else BF16
    return Case(name, dtype, make, tolerance, held * dtype.itemsize, flops, small=small)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    big: dict[str, Any] = {"small": False, "block_size": 64}
    lite, kimi = (16, 512, 64, 128), (64, 512, 64, 128)
    made = [
        case("decode, odd heads", f32, DECODE, 3, 32, 16, 16),
        case("decode, odd sizes", f32, DECODE, 2, 24, 8, 12),
        case("decode, split along the context", f32, [(1, 300)], 2, 16, 8, 16, block_size=32),
        case("decode, lines of very different length", bf16, [(1, 500), (1, 3), (1, 70)], 16, 32, 16, 16),
        case("decode, more lines than have their own joins", f32, [(1, 3 + 40 * i) for i in range(9)], 2, 32, 16, 16),
        case("mixed lines", f32, [*DECODE, (5, 5), (7, 40)], 5, 32, 16, 16),
        case("mixed lines, bfloat16", bf16, [(1, 33), (9, 20)], 16, 64, 16, 32),
        case("many heads", bf16, [(1, 20), (3, 18)], 80, 16, 16, 16),
        case("expanded", f32, [(5, 5), (70, 90)], 3, 32, 16, 16, expanded=True),
        case("expanded beside decode, bfloat16", bf16, [*DECODE, (9, 140), (150, 150)], 2, 64, 16, 32, expanded=True),
        case("8 bits, decode, odd sizes", f32, DECODE, 2, 24, 8, 12, fp8_scale=0.02),
        case(
            "8 bits, lines of very different length", bf16, [(1, 500), (1, 3), (1, 70)], 16, 32, 16, 16, fp8_scale=0.01
        ),
        case("8 bits, mixed lines", f32, [*DECODE, (5, 5), (7, 40)], 5, 32, 16, 16, fp8_scale=0.03),
        case("8 bits, expanded", bf16, [*DECODE, (9, 140), (150, 150)], 2, 64, 16, 32, expanded=True, fp8_scale=0.02),
        case("8 bits, 64 lines of 1024, 16 heads", bf16, [(1, 1024)] * 64, *lite, **big, fp8_scale=0.02),
        case(
            "8 bits, odd ones expanded", bf16, [(129, 1000), (700, 2777)], *lite, **big, expanded=True, fp8_scale=0.02
        ),
        case("1 line of 384, 16 heads", bf16, [(1, 384)], *lite, **big),
        case("1 line of 4096, 16 heads", bf16, [(1, 4096)], *lite, **big),
        case("8 lines of 1024, 16 heads", bf16, [(1, 1024)] * 8, *lite, **big),
        case("5 lines of 8000, 16 heads", bf16, [(1, 8000)] * 5, *lite, **big),
        case("17 lines of 3 to 1027, 16 heads", bf16, [(1, 3 + 64 * i) for i in range(17)], *lite, **big),
        case("192 lines of 1 to 765, 16 heads", bf16, [(1, 1 + 4 * i) for i in range(192)], *lite, **big),
        case("64 lines of 1024, 16 heads", bf16, [(1, 1024)] * 64, *lite, **big),
        case("64 lines of 1 to 2017, 16 heads", bf16, [(1, 1 + 32 * i) for i in range(64)], *lite, **big),
        case("64 lines of 1024, 64 heads", bf16, [(1, 1024)] * 64, *kimi, **big),
        case("one chunk of 2048, 16 heads", bf16, [(2048, 2048)], *lite, **big),
        case("8 of 1024 expanded, 16 heads", bf16, [(1024, 1024)] * 8, *lite, **big, expanded=True),
        case("odd ones expanded, 16 heads", bf16, [(129, 1000), (65, 65), (700, 2777)], *lite, **big, expanded=True),
        case("8192 expanded, 16 heads", bf16, [(8192, 8192)], *lite, **big, expanded=True),
        case("2048 of 8192 expanded, 64 heads", bf16, [(2048, 8192)], *kimi, **big, expanded=True),
    ]
    names = ("decode, odd heads", "mixed lines", "mixed lines, bfloat16", "64 lines of 1024, 16 heads")
    return made + deterministic(made, *names, "8 bits, mixed lines")
