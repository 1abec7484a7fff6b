"""Random blocks in the formats of GGUF files."""

from __future__ import annotations

import torch

from kernels.linear import gguf_cases


def blocks(name: str, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Random rows of `count` blocks."""
    return gguf_cases.blocks(name, rows, count, torch.Generator().manual_seed(seed))
