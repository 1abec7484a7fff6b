"""Packed integers of a checkpoint (GPTQ, AWQ, compressed-tensors), from its words to words along inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kernels.weight.packed import integers, packed

Stored = Literal["gptq", "awq", "pack-quantized"]
# AWQ's outputs 0 to 7 have places 0, 4, 1, 5, 2, 6, 3, 7 of a word's eight: a matrix of these sizes, transposed.
AWQ_PLACES = (2, 4)
# Of words that are repacked at once: caches hold what they are in between.
BLOCK_BYTES = 1 << 20


def repack(
    words: torch.Tensor, layout: Stored, bits: int, outputs: int, places: torch.Tensor | None = None
) -> torch.Tensor:
    """words int32, whose rows may stand apart → [N, ceil(K · bits / 32)] int32: input i of a word in its bits from
    `bits` · i on, zeros behind the last input. bits 4 or 8; outputs is N.

    layout says how words stand: "gptq" [ceil(K · bits / 32), N], along inputs; "pack-quantized" the same turned; "awq"
    [K, ceil(N / 8)] of 4 bits, eight outputs a word. places [C] int64, of the first two, holds inputs, any of them
    several times: input places[c] comes to stand at c, of C. Without it whole words are moved, with all of their bits.
    """
    if layout == "awq":
        return torch.cat([_by_outputs(part) for part in _blocks(words)])[:outputs]
    if places is None:
        return (words.t() if layout == "gptq" else words).contiguous()
    if layout == "gptq":
        return torch.cat([_reordered(part, bits, places) for part in _blocks(words)])
    numbers = integers(words.contiguous().view(torch.uint8), bits)
    return packed(numbers[:, places], bits).view(torch.int32)


def _blocks(words: torch.Tensor) -> Sequence[torch.Tensor]:
    """Columns of words [R, C] int32."""
    return words.split(max(1, BLOCK_BYTES // max(4 * len(words), 1)), dim=1)


def _by_outputs(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words [K, W] int32 → [8 · W, ceil(K / 8)] int32, along inputs.

    Eight words of eight inputs are a square of 4-bit numbers, which is transposed in three rounds: halves, quarters and
    single numbers change places (Hacker's Delight, section 7-3).
    """
    square = torch.nn.functional.pad(words, (0, 0, 0, -len(words) % 8)).contiguous().unflatten(0, (-1, 8))
    for apart, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        # Words beside each other go through an operation together.
        first, second = square.unflatten(1, (-1, 2, apart)).unbind(2)
        swapped = (first >> 4 * apart).bitwise_xor_(second).bitwise_and_(mask)
        second.bitwise_xor_(swapped)
        first.bitwise_xor_(swapped.bitwise_left_shift_(4 * apart))
    places = square.unflatten(1, AWQ_PLACES).transpose(1, 2).flatten(1, 2).unbind(1)
    return torch.stack([place.t().contiguous() for place in places], dim=1).flatten(0, 1)


def _reordered(words: torch.Tensor, bits: int, places: torch.Tensor) -> torch.Tensor:
    """GPTQ's words [W, N] int32 → [N, words] int32, along inputs, which stand as `places` says."""
    rows = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4)).transpose(1, 2).flatten(0, 1)
    if bits == 4:
        rows = torch.stack((rows & 15, rows >> 4), dim=1).flatten(0, 1)
    rows = torch.nn.functional.pad(rows.index_select(0, places), (0, 0, 0, -len(places) % (32 // bits)))
    if bits == 4:
        rows = (rows[1::2] << 4).bitwise_or_(rows[0::2])
    # Whole words are turned several times as fast as bytes.
    turned = rows.unflatten(0, (-1, 4)).transpose(1, 2).flatten(1).view(torch.int32)
    return turned.t().contiguous()
