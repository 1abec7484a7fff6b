"""What a weight holds follows its parameters: on a GPU kernels are compiled with it before it is filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.quant.formats.fp8 import Fp8
from engine.quant.scheme import Fp8Scheme
from engine.quant.weight import Weight


def loaded(weight: Weight) -> None:
    for name, parameter in weight.named_parameters():
        parameter.copy_(torch.tensor([0.25, 0.5]) if name == "input_scale" else torch.ones(parameter.shape))
    weight.check("q")


def drawn(weight: Weight) -> None:
    weight.draw(0.1, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("filled", "scale"), [(loaded, 0.5), (drawn, 8 / 448)])
def test_what_was_computed_of_parameters_before_they_were_filled_is_forgotten(
    filled: Callable[[Weight], None], scale: float
) -> None:
    weight = Weight((16, 32), torch.bfloat16)
    weight.hold(Fp8(Fp8Scheme("static"), "weight_scale", None, None, sources=2))
    weight.to_empty(device=torch.device("cpu"))
    weight.input_scale.zero_()
    before = weight.value.inputs.scale
    assert before is not None
    assert before == 0
    filled(weight)
    inputs = weight.value.inputs
    assert inputs.scale == pytest.approx(scale)
