# mypy: disable-error-code="no-untyped-def"
"""Numbers of blocks of GGUF files in Triton kernels: of 128 inputs of some rows, as float32.

Bits are loaded as words of 16, the widest that every format stands on, and each word gives all its numbers to the
thread that has it: in the order of inputs, the bits of a word's two bytes stand next to each other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.weight.gguf import FORMATS, IQ4_VALUES

# Inputs of a tile: a block is a whole number of tiles, or a tile a whole number of blocks.
WIDTH = 128
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _word(values: tuple[int, ...]) -> int:
    """Eight signed bytes, the first lowest, as a signed number of 64 bits."""
    return int.from_bytes(bytes(value & 255 for value in values), "little", signed=True)


FIRST_VALUES, LAST_VALUES = tl.constexpr(_word(IQ4_VALUES[:8])), tl.constexpr(_word(IQ4_VALUES[8:]))


@triton.jit
def _byte(data, at, there):
    return tl.load(data + at, mask=there, other=0).to(tl.int32)


@triton.jit
def _signed(q):
    """Bytes 0 to 255 as numbers from -128 on."""
    return q - ((q & 128) << 1)


@triton.jit
def _half(shorts, at, there):
    """The 16-bit float at byte `at` (even) of the data."""
    return tl.load(shorts + at // 2, mask=there, other=0).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _iq4(q):
    word = tl.where(q < 8, tl.full((), FIRST_VALUES, tl.int64), tl.full((), LAST_VALUES, tl.int64))
    return _signed((word >> ((q & 7) * 8)).to(tl.int32) & 255)


@triton.jit
def _bits(shorts, start, there, first, CHUNKS: tl.constexpr, APART: tl.constexpr, WORDS: tl.constexpr,
          NUMBERS: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """BITS bits of each of 128 numbers, int32 [BN, 128]. start [BN]: the word at which the first chunk begins; there
    [BN, CHUNKS] or [BN, 1]: what is read. A chunk is WORDS words, APART words from the one before; NUMBERS: a byte has
    bits of so many numbers, 2 · WORDS inputs from each other, from its bit `first` on."""
    chunk, word = tl.arange(0, CHUNKS), tl.arange(0, WORDS)
    place = start[:, None, None] + (chunk * APART)[None, :, None] + word[None, None, :]
    held = tl.load(shorts + place, mask=there[:, :, None], other=0).to(tl.int32)
    number, byte = tl.arange(0, NUMBERS), tl.arange(0, 2)
    shift = first + (number * BITS)[None, None, :, None, None] + (byte * 8)[None, None, None, None, :]
    return tl.reshape(held[:, :, None, :, None] >> shift & ((1 << BITS) - 1), (start.shape[0], 128))


@triton.jit
def _quants(shorts, row, at, live, K, FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr):
    """Numbers [BN, 128] of inputs from `at` on, less their zero point, int32. row [BN]: words at which rows begin."""
    start = row + at // VALUES * (SIZE // 2)
    second = at % VALUES // 128
    one = live[:, None]
    four = one & (at + tl.arange(0, 4) * 32 < K)[None, :]
    if FORMAT == "Q4_0":
        q = _bits(shorts, start + 1, four, 0, 4, 9, 8, 2, 4) - 8
    elif FORMAT == "Q4_1":
        q = _bits(shorts, start + 2, four, 0, 4, 10, 8, 2, 4)
    elif FORMAT == "Q5_0":
        q = (_bits(shorts, start + 3, four, 0, 4, 11, 8, 2, 4) | _fifth(shorts, start + 1, four, 11) << 4) - 16
    elif FORMAT == "Q5_1":
        q = _bits(shorts, start + 4, four, 0, 4, 12, 8, 2, 4) | _fifth(shorts, start + 2, four, 12) << 4
    elif FORMAT == "Q8_0":
        q = _signed(_bits(shorts, start + 1, four, 0, 4, 17, 16, 1, 8))
    elif FORMAT == "IQ4_NL":
        q = _iq4(_bits(shorts, start + 1, four, 0, 4, 9, 8, 2, 4))
    elif FORMAT == "IQ4_XS":
        q = _iq4(_bits(shorts, start + 4 + second * 32, four, 0, 4, 8, 8, 2, 4))
    elif FORMAT == "Q2_K":
        q = _bits(shorts, start + 8 + second * 16, one, 0, 1, 0, 16, 4, 2)
    elif FORMAT == "Q3_K":
        low = _bits(shorts, start + 16 + second * 16, one, 0, 1, 0, 16, 4, 2)
        q = low + 4 * _bits(shorts, start, one, second * 4, 1, 0, 16, 4, 1) - 4
    elif FORMAT == "Q4_K":
        q = _bits(shorts, start + 8 + second * 32, one, 0, 2, 16, 16, 2, 4)
    elif FORMAT == "Q5_K":
        low = _bits(shorts, start + 24 + second * 32, one, 0, 2, 16, 16, 2, 4)
        q = low | _bits(shorts, start + 8, one, second * 4, 1, 0, 16, 4, 1) << 4
    else:
        tl.static_assert(FORMAT == "Q6_K")
        low = _bits(shorts, start + second * 32, one, 0, 1, 0, 32, 2, 4)
        q = (low | _bits(shorts, start + 64 + second * 16, one, 0, 1, 0, 16, 4, 2) << 4) - 32
    return q


@triton.jit
def _fifth(shorts, start, there, APART: tl.constexpr):
    """Bit i % 32 of the 32 bits of number i's block, [BN, 128]."""
    block, word = tl.arange(0, 4), tl.arange(0, 2)
    place = start[:, None, None] + (block * APART)[None, :, None] + word[None, None, :]
    held = tl.load(shorts + place, mask=there[:, :, None], other=0).to(tl.int32)
    return tl.reshape(held[:, :, :, None] >> tl.arange(0, 16)[None, None, None, :] & 1, (start.shape[0], 128))


@triton.jit
def _scales(data, shorts, base, g, there, FORMAT: tl.constexpr):
    """Of groups g of the blocks at byte `base`: what their numbers are multiplied by, and what is added then."""
    added = tl.zeros(base.shape, tl.float32)
    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        scale = _half(shorts, base, there)
        added = _half(shorts, base + 2, there)
    elif FORMAT == "IQ4_XS":
        low = _byte(data, base + 4 + g // 2, there) >> (g % 2 * 4) & 15
        high = _byte(data, base + 2 + g // 4, there) >> (g % 4 * 2) & 3
        scale = _half(shorts, base, there) * ((low | high << 4) - 32).to(tl.float32)
    elif FORMAT == "Q2_K":
        both = _byte(data, base + g, there)
        scale = _half(shorts, base + 80, there) * (both & 15).to(tl.float32)
        added = -_half(shorts, base + 82, there) * (both >> 4).to(tl.float32)
    elif FORMAT == "Q3_K":
        low = _byte(data, base + 96 + g % 8, there) >> (g // 8 * 4) & 15
        high = _byte(data, base + 104 + g % 4, there) >> (g // 4 * 2) & 3
        scale = _half(shorts, base + 108, there) * ((low | high << 4) - 32).to(tl.float32)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        # Six bits each: of the first four groups in a byte of their own, of the others parted.
        first = _byte(data, base + 4 + g % 4, there)
        second = _byte(data, base + 8 + g % 4, there)
        third = _byte(data, base + 12 + g % 4, there)
        times = tl.where(g < 4, first & 63, third & 15 | first >> 6 << 4)
        least = tl.where(g < 4, second & 63, third >> 4 | second >> 6 << 4)
        scale = _half(shorts, base, there) * times.to(tl.float32)
        added = -_half(shorts, base + 2, there) * least.to(tl.float32)
    elif FORMAT == "Q6_K":
        scale = _half(shorts, base + 208, there) * _signed(_byte(data, base + 192 + g, there)).to(tl.float32)
    else:
        scale = _half(shorts, base, there)
    return scale, added


@triton.jit
def block_numbers(data, shorts, row, at, live, K, FORMAT: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
                  GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Inputs [at, at + BK) of the rows that begin at byte `row` [BN]: [BN, BK] float32, nothing where they end. Plain
    formats have data of their own dtype, and `row` counts its numbers."""
    # In one chain, for the compiler goes on behind a return that stands within an if.
    if VALUES == 1:
        k = at + tl.arange(0, BK)
        there = live[:, None] & (k < K)[None, :]
        w = tl.load(data + row[:, None] + k[None, :], mask=there, other=0.0).to(tl.float32)
    else:
        GROUPS: tl.constexpr = BK // GROUP
        q = _quants(shorts, row // 2, at, live, K, FORMAT, VALUES, SIZE)
        first = at + tl.arange(0, GROUPS) * GROUP
        inside = live[:, None] & (first < K)[None, :]
        scale, added = _scales(
            data, shorts, row[:, None] + (first // VALUES * SIZE)[None, :], (first % VALUES // GROUP)[None, :], inside,
            FORMAT,
        )  # fmt: skip
        wide = tl.reshape(q.to(tl.float32), (BN, GROUPS, GROUP))
        w = tl.reshape(wide * scale[:, :, None] + added[:, :, None], (BN, BK))
    return w


def views(part: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A part's bytes, and the same as words of 16 bits; of a plain format its numbers."""
    if name in PLAIN:
        return part.view(PLAIN[name]), None
    return part, part.view(torch.int16)


def stride(part: torch.Tensor, name: str) -> int:
    """Of a row, as kernels count it."""
    return part.shape[-1] // (PLAIN[name].itemsize if name in PLAIN else 1)


def constants(name: str) -> dict[str, Any]:
    """What kernels are made for."""
    form = FORMATS[name]
    plain = name in PLAIN
    return {
        "FORMAT": "plain" if plain else name,
        "VALUES": form.num_values,
        "SIZE": form.num_bytes,
        "GROUP": 16 if name in ("Q2_K", "Q3_K", "Q6_K") else 32,
    }
