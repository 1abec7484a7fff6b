"""A projection and the norm behind it: which of them norms, and that it makes no difference to what is computed."""

from __future__ import annotations

import pytest
import torch

from engine.layers.build_context import BuildContext
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.models.config import ModelConfig, NormConfig
from engine.quant.formats.fp8 import Fp8
from engine.quant.scheme import Fp8Scheme
from kernels.select import select
from kernels.thresholds import NORMED_ROWS
from kernels.workspace import Workspace

CPU = torch.device("cpu")
CONFIG = ModelConfig("test", 8, 12, (), NormConfig(eps=1e-5, offset=1.0), 64, tied=False)


def made(bias: bool = False, deterministic: bool = False) -> tuple[Linear, RmsNorm]:
    build = BuildContext(select(Workspace(CPU)), CONFIG, torch.float32, CPU, 64, deterministic)
    linear, norm = Linear(20, 12, build, bias), RmsNorm(12, build)
    for layer in (linear, norm):
        layer.to_empty(device=CPU)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    return linear, norm


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_come_with_their_norm(bias: bool) -> None:
    linear, norm = made(bias)
    x, residual = torch.randn(NORMED_ROWS + 1, 20), torch.randn(NORMED_ROWS + 1, 12)
    y, normed = linear.forward_with_next_norm(x, residual.clone(), norm)
    torch.testing.assert_close(y, linear(x, residual=residual))
    torch.testing.assert_close(normed, norm(y))


@pytest.mark.parametrize("rows", [1, NORMED_ROWS, NORMED_ROWS + 1])
def test_a_norm_is_left_to_what_reads_it(rows: int) -> None:
    """For few rows; without a residual, whose sum may be another op's; and deterministic, where any number of rows is
    normed in one place."""
    x, residual = torch.randn(rows, 20), torch.randn(rows, 12)
    for given, deterministic in ((None, False), (residual, True), (residual, rows > NORMED_ROWS)):
        linear, norm = made(deterministic=deterministic)
        y, normed = linear.forward_with_next_norm(x, None if given is None else given.clone(), norm)
        assert normed is None
        torch.testing.assert_close(y, linear(x, residual=None if given is None else given.clone()))
    linear, _ = made()
    assert linear.forward_with_next_norm(x, residual, None)[1] is None


def test_a_norm_is_left_to_inputs_that_are_rounded() -> None:
    """What reads them rounds its own too, and norms them in the same launch."""
    linear, norm = made()
    wide = linear.weight.value.dense(torch.float32)
    linear.weight.hold(Fp8(Fp8Scheme("dynamic"), "weight_scale", None, None, sources=1))
    linear.to_empty(device=CPU)
    linear.weight.data.copy_(wide)
    linear.weight.scale.fill_(1.0)
    rows = NORMED_ROWS + 1
    _, normed = linear.forward_with_next_norm(torch.randn(rows, 20), torch.randn(rows, 12), norm)
    assert normed is None
