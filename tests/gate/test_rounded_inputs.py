"""The gate of checkpoints whose products round their inputs: against transformers' dequantized model with the same
rounding in front of each projection, in float32. A rounding that falls the other way by the last bit of a sum moves an
input by a whole step, so the limits are wider than those of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, WeightsConfig
from engine.runner.build import build_runner
from tests.gate.conftest import quick
from tests.gate.fp4 import INPUT_FACTOR, VALUES
from tests.gate.oracle import Golden, Sequence, golden
from tests.gate.packings import PACKINGS, PROJECTIONS, Packing, model_of, packed_golden, said, tensors_of
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import judge

PLAYED = 4
SHAPE = SHAPES[0]
E4M3 = torch.float8_e4m3fn

Rounding = Callable[[torch.Tensor], torch.Tensor]


def groups(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def floats(size: int) -> Rounding:
    """8-bit floats, with a scale for `size` inputs; 0 is a row."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        parts = groups(x, size or x.shape[-1])
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        return ((parts / scale).to(E4M3).float() * scale).flatten(-2)[..., : x.shape[-1]]

    return rounded


def floats_of_given_scale(x: torch.Tensor) -> torch.Tensor:
    scale = 8 / 448
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def integers(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def integers_of_given_scale(x: torch.Tensor) -> torch.Tensor:
    scale = 8 / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def nearest(ratio: torch.Tensor) -> torch.Tensor:
    """The nearest 4-bit float, of two equally near the one whose code is even."""
    sizes = VALUES[:8]
    away = (ratio.abs()[..., None] - sizes).abs()
    even = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = even[away[..., even].argmin(-1)]
    return sizes[code] * ratio.sign()


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    parts = groups(x, 16)
    fine = (parts.abs().amax(-1, keepdim=True) / 6 / INPUT_FACTOR).clamp(max=448).to(E4M3).float()
    scale = fine.clamp(min=2.0**-9) * INPUT_FACTOR
    return (nearest((parts / scale).clamp(-6, 6)) * scale).flatten(-2)[..., : x.shape[-1]]


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    """The scale is a power of two: a quarter of the largest magnitude's, which counts as the next from 1.75 on."""
    parts = groups(x, 32)
    mantissa, exponent = torch.frexp(parts.abs().amax(-1, keepdim=True).clamp(min=1e-30))
    scale = torch.exp2(exponent - 3.0 + (mantissa >= 0.875))
    return (nearest((parts / scale).clamp(-6, 6)) * scale).flatten(-2)[..., : x.shape[-1]]


# By the packing's name: what its products do to their inputs.
ROUNDINGS: dict[str, Rounding] = {
    "fp8-blocks-f32": floats(128),
    "ct-fp8-rows": floats(0),
    "ct-fp8-tensor-static": floats_of_given_scale,
    "ct-w8a8": integers,
    "ct-w8a8-static": integers_of_given_scale,
    "ct-nvfp4-inputs": nvfp4,
    "modelopt-nvfp4-inputs": nvfp4,
    "ct-mxfp4-inputs": mxfp4,
}


def passes(divergence: float, mean: float) -> bool:
    return divergence <= 1.5e-3 and mean <= 0.02


CASES = [pytest.param(SHAPE, packing, id=packing.name) for packing in PACKINGS if packing.name in ROUNDINGS]


def play(truth: Golden, shape: Shape, activations: str) -> tuple[float, float]:
    """How far the engine is from what was said: mean Kullback-Leibler divergence over the tokens that it reports, and
    mean |Δ log-probability| of the likeliest."""
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=300,
        scheduler=SchedulerConfig(max_rows=12, token_budget=4096),
        cache=CacheConfig(block_size=shape.block_size, num_blocks=4096 // shape.block_size),
        runtime=RuntimeConfig(dtype="float32"),
        weights=WeightsConfig(activations=activations),  # type: ignore[arg-type]
    )
    engine = Engine(build_runner(config), config).start()
    try:
        played = EnginePlayer(engine).play(truth.sequences)
    finally:
        engine.close()
    verdict = judge(truth.sequences, played, "float32")
    divergences = []
    for sequence, entries in zip(truth.sequences, played, strict=True):
        for whole, entry in zip(sequence.logprobs["float32"], entries, strict=True):
            ids, values = np.unique(entry.ids, return_index=True)
            found = np.asarray(entry.logprobs)[values]
            divergences.append(float((np.exp(whole[ids]) * (whole[ids] - found)).sum()))
    return float(np.mean(np.abs(divergences))), verdict.mean


@pytest.mark.xdist_group(SHAPE.name)
@pytest.mark.parametrize(("shape", "packing"), CASES)
def test_inputs_are_rounded_as_the_checkpoint_says(shape: Shape, packing: Packing, pytestconfig: pytest.Config) -> None:
    cache, shape = Path(pytestconfig.rootpath) / ".cache" / "gate", quick(shape)
    base = golden(shape, cache)
    folder = packed_golden(shape, base, packing, cache).folder
    _, plain = tensors_of(base, packing)
    model = model_of(base, plain)
    for module, layer in model.named_modules():
        if f"{module}.weight".endswith(PROJECTIONS):
            layer.register_forward_pre_hook(lambda _, given: (ROUNDINGS[packing.name](given[0]),))
    sequences = [
        Sequence(one.prompt, one.forced, {"float32": said(model, one)}) for one in base.sequences[: 4 * PLAYED : 4]
    ]
    truth = Golden(folder, sequences, sequences[-1])
    assert passes(*play(truth, shape, "auto"))
    assert not passes(*play(truth, shape, "16bit")), "it would not be seen that inputs stay as they are"
