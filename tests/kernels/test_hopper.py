"""Descriptions of tensors for the bulk copy engine: Triton's own, checked once for each shape."""

from __future__ import annotations

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.boxes import boxes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("box", [(64, 64), (16, 128)])
def test_a_description_is_what_triton_makes(dtype: torch.dtype, box: tuple[int, int]) -> None:
    whole = torch.zeros(40, 256, dtype=dtype)
    for source in (whole, whole[8:], whole[:, 64:192], whole[1:2]):
        made = boxes(source, *box)
        assert type(made) is TensorDescriptor
        assert made.base is source
        again = TensorDescriptor(source, list(source.shape), list(source.stride()), list(box), made.layout)
        assert {**vars(made), "base": None} == {**vars(again), "base": None}


def test_tensors_of_one_shape_have_descriptions_of_their_own() -> None:
    one, other = (torch.zeros(8, 64, dtype=torch.bfloat16) for _ in range(2))
    assert boxes(one, 8, 64).base is one
    assert boxes(other, 8, 64).base is other


def test_what_the_copy_engine_cannot_read_is_refused() -> None:
    whole = torch.zeros(8, 68, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        boxes(whole.flatten()[4:68].view(1, 64), 1, 64)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        boxes(whole[:, :64], 8, 64)
