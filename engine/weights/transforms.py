"""What is made of a source's tensors while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine.weights.rules import Block, Shape


@dataclass(frozen=True, slots=True)
class RowScales:
    """A scale for each row of a view [N, 1], of a source that has one a row or one in all. A view [N, S, 1] is of S
    matrices that stand side by side in the source, whose rows they share."""

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return prod(shapes[0]) in (1, view[0])

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        return tensors[0].reshape(-1, *(1,) * (len(view) - 1)).expand(view)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Scales of blocks of so many rows, given to each of their rows: [ceil(N / rows), C] → [N, C]. A view [N, S, C] is
    of S matrices that stand side by side in the source; one block may hold them all."""

    rows: int

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        blocks, columns = shapes[0]
        return blocks == -(-view[0] // self.rows) and columns in (1, prod(view[1:]))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        scales = tensors[0].repeat_interleave(self.rows, dim=0)[: view[0]]
        return scales.reshape(view) if scales.numel() == prod(view) else scales[:, None].expand(view)


@dataclass(frozen=True, slots=True)
class Exponents:
    """Powers of two of exponents (e8m0: 2^(b − 127), 255 is NaN), which files may call bytes."""

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return shapes[0] == view

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        return powers(tensors[0])


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents as bytes, or under their own dtype → float32."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


@dataclass(frozen=True, slots=True)
class Dequantized:
    """data [N, K] times its scales, for what takes dense numbers alone. block as in `kernels.weight.Fp8`; None for
    a scale a row or one in all."""

    block: Block | None

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        (n, k), scales = shapes[0], shapes[1]
        wanted = None if self.block is None else (-(-n // self.block[0]), -(-k // self.block[1]))
        return n * k == prod(view) and (scales == wanted if wanted else prod(scales) in (1, n))

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor:
        data = tensors[0].float()
        scale = powers(tensors[1]) if tensors[1].dtype == torch.uint8 else tensors[1].float()
        if self.block is None:
            return (data * scale.reshape(-1, 1)).reshape(view)
        spread = scale.repeat_interleave(self.block[0], dim=0).repeat_interleave(self.block[1], dim=1)
        return (data * spread[: data.shape[0], : data.shape[1]]).reshape(view)
