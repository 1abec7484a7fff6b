"""A weight in blocks as GGUF files store them (ggml's docs/gguf.md, and the structures of ggml-common.h).

Every format cuts a row into runs of values and stores each run, a block, in a fixed number of bytes: its numbers, and
scales for groups of them. Rows of one weight may be in different formats: a file chooses one for each of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.sizes import cdiv
from kernels.weight.base import Weight, rows_of_parts
from kernels.weight.dense import Dense

# What the 4 bits of the IQ4 formats stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Numbers that are written out at once on the way to a product: few enough to stay in a core's cache (2 to 7 times as
# fast as 1 << 22).
CHUNK = 1 << 19
PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`num_bytes` for every `num_values` along a row; numbers: blocks [n, num_bytes] → [n, num_values] float32."""

    num_values: int
    num_bytes: int
    numbers: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GgufBlocks(Weight):
    """parts[i] uint8 [.., N_i, bytes of a row] are rows in the format formats[i], a name of `FORMATS`; they stand one
    after another, N in all. inputs is K, whole blocks of each format."""

    parts: tuple[torch.Tensor, ...]
    formats: tuple[str, ...]
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.parts[0].shape[:-2], sum(part.shape[-2] for part in self.parts), self.inputs)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        held = zip(self.parts, self.formats, strict=True)
        return torch.cat([dequantize(part, name).to(dtype) for part, name in held], dim=-2)

    def matrix(self, index: int) -> GgufBlocks:
        return GgufBlocks(tuple(part[index] for part in self.parts), self.formats, self.inputs)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        def read(part: int, own: torch.Tensor) -> torch.Tensor:
            return dequantize(self.parts[part][own], self.formats[part]).to(dtype)

        return rows_of_parts(ids, [len(part) for part in self.parts], self.inputs, dtype, read)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, deterministic: bool = False) -> torch.Tensor:
        """Rows are written out in runs of about CHUNK numbers, so that a large weight never stands whole in float32."""
        wide, made = x.float(), []
        each = max(1, CHUNK // self.inputs)
        for part, name in zip(self.parts, self.formats, strict=True):
            for run in part.split(each):
                made.append(Dense(dequantize(run, name)).product(wide, None, deterministic))
        y = torch.cat(made, dim=-1)
        return (y if bias is None else y + bias.float()).to(x.dtype)


def dequantize(data: torch.Tensor, name: str) -> torch.Tensor:
    """data uint8 [.., bytes of a row] in the format `name` → its numbers [.., K] float32."""
    form = FORMATS[name]
    blocks = data.reshape(-1, form.num_bytes)
    return form.numbers(blocks).reshape(*data.shape[:-1], data.shape[-1] // form.num_bytes * form.num_values)


def as_blocks(weight: Weight) -> Weight:
    """A dense weight as blocks of one number each; others as they are."""
    name = PLAIN.get(weight.data.dtype) if isinstance(weight, Dense) else None
    if not isinstance(weight, Dense) or name is None:
        return weight
    return GgufBlocks((weight.data.contiguous().view(torch.uint8),), (name,), weight.shape[-1])


def row_bytes(inputs: int, name: str) -> int:
    """Bytes of a row of `inputs` values."""
    return cdiv(inputs, FORMATS[name].num_values) * FORMATS[name].num_bytes


def _halves(data: torch.Tensor, at: int) -> torch.Tensor:
    """The 16-bit float at byte `at` of each block: [n, 1] float32."""
    return data[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int8).float()


def _nibbles(data: torch.Tensor, run: int) -> torch.Tensor:
    """Bytes in runs: the low 4 bits of all of a run, then the high ones: [n, B] → [n, B / run, 2, run]."""
    runs = data.unflatten(1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=2)


def _pairs(data: torch.Tensor) -> torch.Tensor:
    """Bytes in runs of 32: the lowest 2 bits of all of a run, then the next: [n, B] → [n, 4 · B / 32, 32]."""
    runs = data.unflatten(1, (-1, 32))
    return torch.stack([runs >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1, 2)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda data: data.contiguous().view(dtype).float()


def _q4_0(data: torch.Tensor) -> torch.Tensor:
    return (_nibbles(data[:, 2:], 16).flatten(1).float() - 8) * _halves(data, 0)


def _q4_1(data: torch.Tensor) -> torch.Tensor:
    return _nibbles(data[:, 4:], 16).flatten(1).float() * _halves(data, 0) + _halves(data, 2)


def _fives(data: torch.Tensor, at: int) -> torch.Tensor:
    """Values of 5 bits, of which the highest stand in the 4 bytes at `at` and the others behind: [n, 32]."""
    bits = torch.arange(8, dtype=torch.uint8, device=data.device)
    high = (data[:, at : at + 4, None] >> bits & 1).flatten(1)
    return (_nibbles(data[:, at + 4 :], 16).flatten(1) | high << 4).float()


def _q5_0(data: torch.Tensor) -> torch.Tensor:
    return (_fives(data, 2) - 16) * _halves(data, 0)


def _q5_1(data: torch.Tensor) -> torch.Tensor:
    return _fives(data, 4) * _halves(data, 0) + _halves(data, 2)


def _q8_0(data: torch.Tensor) -> torch.Tensor:
    return _signed(data[:, 2:]) * _halves(data, 0)


def _q2_k(data: torch.Tensor) -> torch.Tensor:
    scales = data[:, :16]
    q = _pairs(data[:, 16:80]).float().reshape(-1, 16, 16)
    scale = (_halves(data, 80) * (scales & 15))[..., None]
    least = (_halves(data, 82) * (scales >> 4))[..., None]
    return (scale * q - least).flatten(1)


def _q3_k(data: torch.Tensor) -> torch.Tensor:
    mask, b = data[:, None, :32], data[:, 96:108]
    # Values without their bit in the mask are 4 less.
    bits = torch.arange(8, dtype=torch.uint8, device=data.device)[None, :, None]
    q = _pairs(data[:, 32:96]).float() - 4 * (1 - (mask >> bits & 1).float())
    low = torch.cat((b[:, :8] & 15, b[:, :8] >> 4), dim=1)
    high = torch.cat([b[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scale = _halves(data, 108) * ((low | high << 4).float() - 32)
    return (scale[..., None] * q.reshape(-1, 16, 16)).flatten(1)


def _scales_and_mins(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits, in 12 bytes: [n, 12] → twice [n, 8]."""
    first, second, third = b[:, :4], b[:, 4:8], b[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales, mins


def _shifted(data: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """d · scale · q − dmin · least of groups of 32; q [n, 8, 32]."""
    scales, mins = _scales_and_mins(data[:, 4:16])
    scale, least = _halves(data, 0) * scales, _halves(data, 2) * mins
    return (scale[..., None] * q.float() - least[..., None]).flatten(1)


def _q4_k(data: torch.Tensor) -> torch.Tensor:
    return _shifted(data, _nibbles(data[:, 16:], 32).flatten(1, 2))


def _q5_k(data: torch.Tensor) -> torch.Tensor:
    groups = torch.arange(8, dtype=torch.uint8, device=data.device)[None, :, None]
    fifth = data[:, None, 16:48] >> groups & 1
    return _shifted(data, _nibbles(data[:, 48:], 32).flatten(1, 2) | fifth << 4)


def _q6_k(data: torch.Tensor) -> torch.Tensor:
    # In each half of 128 values: 64 bytes of low bits, of which the high nibbles are the later values.
    low = _nibbles(data[:, :128], 64).flatten(1)
    high = _pairs(data[:, 128:192]).flatten(1)
    q = (low | high << 4).float() - 32
    scale = _halves(data, 208) * _signed(data[:, 192:208])
    return (scale[..., None] * q.reshape(-1, 16, 16)).flatten(1)


def _iq4(data: torch.Tensor) -> torch.Tensor:
    """Bytes in runs of 16 → values [n, B / 16, 32]."""
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=data.device)
    return values[_nibbles(data, 16).flatten(2).int()]


def _iq4_nl(data: torch.Tensor) -> torch.Tensor:
    return _iq4(data[:, 2:]).flatten(1) * _halves(data, 0)


def _iq4_xs(data: torch.Tensor) -> torch.Tensor:
    low = torch.stack((data[:, 4:8] & 15, data[:, 4:8] >> 4), dim=2).flatten(1)
    high = torch.stack([data[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)
    scale = _halves(data, 0) * ((low | high << 4).float() - 32)
    return (scale[..., None] * _iq4(data[:, 8:])).flatten(1)


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, _plain(torch.float32)),
    "F16": BlockFormat(1, 2, _plain(torch.float16)),
    "BF16": BlockFormat(1, 2, _plain(torch.bfloat16)),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs),
}
