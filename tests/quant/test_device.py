"""Weights and caches that a GPU cannot convert are refused before memory is asked for."""

from __future__ import annotations

import pytest
import torch

from engine.models.reader import ConfigError
from engine.quant.device import check_cache, check_weights
from engine.quant.formats import rounded
from engine.quant.weight import Weight
from kernels.hardware import Gpu, described

CUDA = torch.device("cuda", 0)


def weights(kind: rounded.Kind) -> dict[str, Weight]:
    weight = Weight((64, 128), torch.bfloat16)
    weight.hold(rounded.make(kind, 1, weight.shape, False))
    return {"norm.weight": Weight((64, 128), torch.bfloat16), "up.weight": weight}


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_8_bit_floats_are_refused_on_ampere(capability: tuple[int, int]) -> None:
    with described(Gpu(capability, 100)):
        with pytest.raises(ConfigError, match=r"up\.weight holds 8-bit floats .* weights\.quantize int8 and int4"):
            check_weights(weights("fp8"), CUDA)
        with pytest.raises(ConfigError, match=r"set cache\.dtype to 16bit"):
            check_cache(CUDA)
        check_weights(weights("int8"), CUDA)
        check_weights(weights("int4"), CUDA)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_later_gpus_take_8_bit_floats(capability: tuple[int, int]) -> None:
    with described(Gpu(capability, 100)):
        check_weights(weights("fp8"), CUDA)
        check_cache(CUDA)


def test_the_references_on_a_cpu_take_8_bit_floats() -> None:
    check_weights(weights("fp8"), torch.device("cpu"))
    check_cache(torch.device("cpu"))
