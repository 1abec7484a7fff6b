"""Weights that no kernel multiplies by are not made."""

from __future__ import annotations

import pytest
import torch

from kernels.weight import Fp8
from kernels.weight.inputs import Inputs


def fp8(k: int, block: tuple[int, int]) -> Fp8:
    scale = torch.ones(-(-256 // block[0]), -(-k // block[1]))
    return Fp8(torch.zeros(256, k, dtype=torch.float8_e4m3fn), scale, block, Inputs())


def test_rows_share_a_scale_of_128_inputs_and_not_of_more() -> None:
    """`fp8_kernel` reads a scale for each 128 inputs where rows share it, and would read behind the only one."""
    with pytest.raises(ValueError, match="256 rows share one scale for all 384 inputs"):
        fp8(384, (256, 384))
    for k, block in ((128, (256, 128)), (72, (128, 128)), (384, (128, 128)), (384, (1, 384))):
        assert fp8(k, block).dense(torch.float32).shape == (256, k)
