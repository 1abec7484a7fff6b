# mypy: disable-error-code="no-untyped-def"
"""What stands between the projections and attention over a latent cache, in one launch.

Some programs take queries through the up-projection of keys, a head and some latent channels each; the first other
program of some tokens writes their entries, the rest turn their queries, some heads each. From many tokens on the
up-projection is cuBLAS's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_numbers import to_cache
from kernels.cache_scales import latent_views
from kernels.sizes import cdiv, next_power_of_2
from kernels.workspace import Workspace

# Tokens up to which the up-projection is part of the launch.
FUSED_ABSORB_TOKENS = 64
# Tokens up to which each has its own programs to write its entry and to turn its queries.
OWN_TOKENS = 256
# Tokens beside which queries are absorbed in a launch of their own.
SEPARATE_ABSORB_TOKENS = 2048


@triton.jit
def _turn(x, cos, sin, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """x [ROWS, 2 · HALF] by angles cos, sin [ROWS or 1, HALF]."""
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
        return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, 2 * HALF))
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    y = tl.join(a * cos - b * sin, b * cos + a * sin)
    return tl.reshape(tl.permute(y, (0, 2, 1)), (ROWS, 2 * HALF))


@triton.jit
def _write_entries(
    kv, positions, slots, cos_sin, cache, keys, norm, t, kv_stride, block_stride, entry_stride, key_block_stride,
    key_stride, block_size, eps, inverse, tokens,
    LATENT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_L: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Entries of tokens t [TOKENS]."""
    half = tl.arange(0, HALF)[None, :]
    both = tl.arange(0, 2 * HALF)[None, :]
    slot = tl.load(slots + t, mask=t < tokens, other=-1)
    angle = cos_sin + tl.load(positions + t, mask=t < tokens, other=0).to(tl.int64)[:, None] * (2 * HALF)
    written = (slot >= 0)[:, None]
    entry = cache + (slot // block_size * block_stride + slot % block_size * entry_stride)[:, None]
    i = tl.arange(0, BLOCK_L)[None, :]
    own = kv + t.to(tl.int64)[:, None] * kv_stride
    f = tl.load(own + i, mask=written & (i < LATENT), other=0.0).to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 1) / LATENT + eps)[:, None]
    f = f * tl.load(norm + i, mask=i < LATENT, other=0.0).to(tl.float32)
    f = f.to(kv.dtype.element_ty)
    tl.store(entry + i, to_cache(f, inverse, cache.dtype.element_ty), mask=written & (i < LATENT))
    key = tl.load(own + LATENT + both, mask=written, other=0.0).to(tl.float32)
    key = _turn(key, tl.load(angle + half), tl.load(angle + HALF + half), INTERLEAVED, TOKENS, HALF)
    place = keys + (slot // block_size * key_block_stride + slot % block_size * key_stride)[:, None]
    tl.store(place + both, key.to(keys.dtype.element_ty), mask=written)


@triton.jit
def _turn_queries(
    q, positions, cos_sin, taken, t, turned, head, q_token_stride, q_head_stride, tokens, absorbed,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Queries of tokens t and heads `head` [ROWS], in place and into `taken`. turned [ROWS] are the same tokens, or [1]
    the one token."""
    half = tl.arange(0, HALF)[None, :]
    both = tl.arange(0, 2 * HALF)[None, :]
    live = ((head < HEADS) & (t < tokens))[:, None]
    angle = cos_sin + tl.load(positions + turned, mask=turned < tokens, other=0).to(tl.int64)[:, None] * (2 * HALF)
    token = t.to(tl.int64)
    own = q + (token * q_token_stride + head * q_head_stride)[:, None] + NOPE + both
    x = tl.load(own, mask=live, other=0.0).to(tl.float32)
    x = _turn(x, tl.load(angle + half), tl.load(angle + HALF + half), INTERLEAVED, ROWS, HALF).to(q.dtype.element_ty)
    tl.store(own, x, mask=live)
    place = (token * HEADS + head)[:, None] * (LATENT + 2 * HALF) + LATENT + both
    tl.store(taken + place, x, mask=live & (t < absorbed)[:, None])


@triton.jit(do_not_specialize=["tokens", "absorb_programs", "absorbed"])
def _write(
    q,
    kv,
    kv_up,
    positions,
    slots,
    cos_sin,
    cache,
    keys,
    norm,
    taken,
    q_token_stride,
    q_head_stride,
    kv_stride,
    up_stride,
    block_stride,
    entry_stride,
    key_block_stride,
    key_stride,
    block_size,
    eps,
    inverse,
    tokens,
    absorb_programs,
    absorbed,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    TOKENS: tl.constexpr,
    ABSORBS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """HALF is half of the rotated channels, a power of two."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    width: tl.constexpr = LATENT + 2 * HALF
    if ABSORBS and pid < absorb_programs:
        parts: tl.constexpr = (LATENT + BLOCK_C - 1) // BLOCK_C
        channel = pid % parts * BLOCK_C + tl.arange(0, BLOCK_C)
        own_head = (pid // parts % HEADS).to(tl.int64)
        row = pid // (parts * HEADS) * BLOCK_T + tl.arange(0, BLOCK_T)
        plain = tl.arange(0, BLOCK_D)
        up = tl.load(
            kv_up + own_head * up_stride + plain[:, None] * LATENT + channel[None, :],
            mask=(plain < NOPE)[:, None] & (channel < LATENT)[None, :],
            other=0.0,
        )
        if PDL:
            gdc_wait()
        x_plain = tl.load(
            q + row.to(tl.int64)[:, None] * q_token_stride + own_head * q_head_stride + plain[None, :],
            mask=(row < absorbed)[:, None] & (plain < NOPE)[None, :],
            other=0.0,
        )
        y_plain = tl.dot(x_plain, up, input_precision=PRECISION)
        tl.store(
            taken + (row.to(tl.int64)[:, None] * HEADS + own_head) * width + channel[None, :],
            y_plain.to(taken.dtype.element_ty),
            mask=(row < absorbed)[:, None] & (channel < LATENT)[None, :],
        )
    else:
        head_parts: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
        rest = pid - absorb_programs
        part = rest % (1 + head_parts)
        first = rest // (1 + head_parts) * TOKENS
        if PDL:
            gdc_wait()
        if part == 0:
            t = first + tl.arange(0, TOKENS)
            _write_entries(
                kv, positions, slots, cos_sin, cache, keys, norm, t, kv_stride, block_stride, entry_stride,
                key_block_stride, key_stride, block_size, eps, inverse, tokens, LATENT, HALF, INTERLEAVED, BLOCK_L,
                TOKENS,
            )  # fmt: skip
        else:
            row = tl.arange(0, TOKENS * BLOCK_H)
            angles = row // BLOCK_H if TOKENS > 1 else tl.arange(0, 1)
            head = (part - 1) * BLOCK_H + row % BLOCK_H
            _turn_queries(
                q, positions, cos_sin, taken, first + row // BLOCK_H, first + angles, head, q_token_stride,
                q_head_stride, tokens, absorbed, HEADS, NOPE, LATENT, HALF, INTERLEAVED, TOKENS * BLOCK_H,
            )  # fmt: skip


def tokens_each(tokens: int, absorbs: bool) -> int:
    """Tokens that a program writes: several in steps of prompts (8 × 1,024: 24 µs less on an H200), whose programs take
    no shared memory; one beside products, which do."""
    return 1 if absorbs or tokens <= OWN_TOKENS else 4


def absorbs_within(absorbed: int) -> bool:
    """Whether the kernel absorbs so many queries itself; more are cuBLAS's."""
    return 0 < absorbed <= FUSED_ABSORB_TOKENS


def absorbs_apart(tokens: int, absorbed: int) -> bool:
    """Whether it does so in a launch of its own: beside many tokens, most of whose programs do without the memory that
    products take."""
    return absorbs_within(absorbed) and tokens > SEPARATE_ABSORB_TOKENS


def latent_write(
    workspace: Workspace,
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_up: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    norm: torch.Tensor,
    absorbed: int,
    eps: float = 1e-6,
    interleaved: bool = True,
    deterministic: bool = False,
    keys: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> torch.Tensor:
    """See the reference. The last axis of every tensor is dense, kv_up is contiguous, P is twice a power of two."""
    t, heads, width = q.shape
    latent, rope = norm.shape[0], cos_sin.shape[1]
    nope = width - rope
    taken = torch.empty(absorbed, heads, latent + rope, dtype=q.dtype, device=q.device)
    if not t:
        return taken
    pdl = workspace.pdl
    views = latent_views(cache, keys, latent, latent_scale)
    within = deterministic or absorbs_within(absorbed)
    block_c = min(128, max(16, next_power_of_2(latent)))
    block_h = min(16, next_power_of_2(heads))

    def launch(absorbs: bool, writes: bool) -> None:
        # where nothing is absorbed the tile is of no account, and shall not make another kernel
        block_t = 32 if deterministic or (absorbs and absorbed > 16) else 16
        absorb_programs = cdiv(absorbed, block_t) * heads * cdiv(latent, block_c) if absorbs else 0
        each = 1 if deterministic else tokens_each(t, absorbs)
        programs = cdiv(t, each) * (1 + cdiv(heads, block_h)) if writes else 0
        workspace.launch(_write, (absorb_programs + programs,))(
            q, kv, kv_up, positions, slots, cos_sin, views.latents, views.keys, norm, taken, q.stride(0), q.stride(1),
            kv.stride(0), kv_up.stride(0), *views.latents.stride()[:2], *views.keys.stride()[:2], cache.shape[1],
            eps, 1.0 / latent_scale, t, absorb_programs, absorbed,
            HEADS=heads, NOPE=nope, LATENT=latent, HALF=rope // 2, INTERLEAVED=interleaved, BLOCK_T=block_t,
            BLOCK_D=max(16, next_power_of_2(nope)), BLOCK_C=block_c, BLOCK_H=block_h,
            BLOCK_L=next_power_of_2(latent), TOKENS=each, ABSORBS=absorbs,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl, launch_pdl=pdl, num_warps=4,
        )  # fmt: skip

    if absorbs_apart(t, absorbed) and not deterministic:
        launch(absorbs=True, writes=False)
        launch(absorbs=False, writes=True)
    else:
        launch(within, writes=True)
    if absorbed and not within:
        plain = q[:absorbed, :, :nope].transpose(0, 1)
        torch.bmm(plain, kv_up[:, :nope], out=taken[..., :latent].transpose(0, 1))
    return taken
