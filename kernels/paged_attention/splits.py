# mypy: disable-error-code="no-untyped-def,assignment"
"""How keys are cut into splits, one a program: worked out on the device, from the sequences' lengths."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fair_split_size(
    p_context, num_seqs, window, programs, G: tl.constexpr, BLOCK_B: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Keys that each of `programs` programs reads when all keys of the single sequences are dealt out evenly."""
    seqs = tl.arange(0, BLOCK_B)
    read = tl.load(p_context + seqs, mask=seqs < num_seqs, other=0)
    if HAS_WINDOW:
        read = tl.minimum(read, window)
    return tl.sum(read, axis=0) * G // programs


@triton.jit
def even_splits(chunk, split_size, BLOCK_N: tl.constexpr):
    """Keys of a split in whole tiles, and how many splits: as many as it takes of `split_size` keys, none much smaller
    than the others."""
    split_size = (split_size + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    active = (chunk + split_size - 1) // split_size
    split_size = ((chunk + active - 1) // active + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return split_size, (chunk + split_size - 1) // split_size


@triton.jit
def dealt_split(
    p_context,
    num_seqs,
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
    """The split of that number among those of all single sequences: its sequence (`num_seqs` if there are fewer), which
    one of the sequence's it is, of how many, and its keys. Sequences and `programs` / G are at least as many as the
    splits."""
    seqs = tl.arange(0, BLOCK_B)
    m_seq = seqs < num_seqs
    length = tl.load(p_context + seqs, mask=m_seq, other=0)
    chunk = length
    if HAS_WINDOW:
        chunk = length - tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    fair = (tl.sum(chunk, axis=0) * G + programs - 1) // programs
    chunk = tl.maximum(chunk, 1)
    split_size = tl.maximum((chunk + splits - 1) // splits, fair)
    split_size, active = even_splits(chunk, tl.maximum(split_size, least), BLOCK_N)
    active = tl.where(m_seq, active, 0)
    passed = m_seq & (tl.cumsum(active, axis=0) <= number)
    seq = tl.sum(passed.to(tl.int32), axis=0)
    i_split = number - tl.sum(tl.where(passed, active, 0), axis=0)
    mine = seqs == seq
    return seq, i_split, tl.sum(tl.where(mine, active, 0), axis=0), tl.sum(tl.where(mine, split_size, 0), axis=0)
