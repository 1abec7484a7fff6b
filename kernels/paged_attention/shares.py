# mypy: disable-error-code="no-untyped-def,assignment"
"""How keys are cut into shares, one a program: worked out on the device, from the lines' lengths."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fair_share(
    p_context, num_lines, window, programs, G: tl.constexpr, BLOCK_B: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Keys that each of `programs` programs reads when all keys of the single lines are dealt out evenly."""
    lines = tl.arange(0, BLOCK_B)
    read = tl.load(p_context + lines, mask=lines < num_lines, other=0)
    if HAS_WINDOW:
        read = tl.minimum(read, window)
    return tl.sum(read, axis=0) * G // programs


@triton.jit
def even_shares(chunk, share, BLOCK_N: tl.constexpr):
    """Keys of a share in whole tiles, and how many shares: as many as it takes of `share` keys, none much smaller than
    the others."""
    share = (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    active = (chunk + share - 1) // share
    share = ((chunk + active - 1) // active + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return share, (chunk + share - 1) // share


@triton.jit
def dealt_share(
    p_context,
    num_lines,
    splits,
    programs,
    least,
    window,
    number,
    G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The share of that number among those of all single lines: its line (`num_lines` if there are fewer), which one of
    the line's it is, of how many, and its keys. Lines and `programs` / G are at least as many as the shares."""
    lines = tl.arange(0, BLOCK_B)
    m_line = lines < num_lines
    length = tl.load(p_context + lines, mask=m_line, other=0)
    chunk = length
    if HAS_WINDOW:
        chunk = length - tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    fair = (tl.sum(chunk, axis=0) * G + programs - 1) // programs
    chunk = tl.maximum(chunk, 1)
    share = tl.maximum((chunk + splits - 1) // splits, fair)
    share, active = even_shares(chunk, tl.maximum(share, least), BLOCK_N)
    active = tl.where(m_line, active, 0)
    passed = m_line & (tl.cumsum(active, axis=0) <= number)
    line = tl.sum(passed.to(tl.int32), axis=0)
    i_split = number - tl.sum(tl.where(passed, active, 0), axis=0)
    mine = lines == line
    return line, i_split, tl.sum(tl.where(mine, active, 0), axis=0), tl.sum(tl.where(mine, share, 0), axis=0)
