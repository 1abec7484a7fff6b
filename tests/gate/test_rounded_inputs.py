"""The gate of checkpoints whose products round their inputs: against transformers' dequantized model with the same
rounding in front of each projection, in float32. A rounding that falls the other way by the last bit of a sum moves an
input by a whole step, so the limits are wider than those of weights: on a CPU, whose sums are transformers', a fixed
number; on a GPU a little more than transformers is from itself where its products are off by what a GPU's are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, WeightsConfig
from engine.runner.build import build_runner
from engine.types import TokenLogprobs
from tests.gate.conftest import quick
from tests.gate.fp4 import INPUT_FACTOR, VALUES
from tests.gate.fp8 import FBGEMM, part_pack
from tests.gate.oracle import Golden, Sequence, golden
from tests.gate.packings import PACKINGS, PROJECTIONS, Packing, model_of, packed_golden, said, tensors_of
from tests.gate.player import EnginePlayer
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import NUM_LOGPROBS, judge

PLAYED = 4
SHAPE = SHAPES[0]
E4M3 = torch.float8_e4m3fn

Rounding = Callable[[torch.Tensor], torch.Tensor]


def groups(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def floats(size: int, largest: float | None = None, powers: bool = False) -> Rounding:
    """8-bit floats, with a scale for `size` inputs; 0 is a row. largest: what is beyond becomes it. powers: scales are
    powers of two, the least of which all numbers are within the range."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        parts = groups(x, size or x.shape[-1])
        scale = parts.abs().amax(-1, keepdim=True).clamp(1e-10, largest) / 448
        if powers:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return ((parts / scale).clamp(-448, 448).to(E4M3).float() * scale).flatten(-2)[..., : x.shape[-1]]

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
    "ct-w4a8": integers,
    "ct-w4afp8": floats(0),
    "ct-nvfp4-inputs": nvfp4,
    "modelopt-nvfp4-inputs": nvfp4,
    "ct-mxfp4-inputs": mxfp4,
    "ct-mxfp8-inputs": floats(32, powers=True),
    "fbgemm-fp8": floats(0, largest=FBGEMM["activation_scale_ub"]),
}


def of_parts(module: str) -> Rounding | None:
    return None if part_pack(module) is None else floats(0)


def of_layers(module: str) -> Rounding | None:
    """By the names in MIXED."""
    if not module.startswith("model.layers.0.self_attn."):
        return None
    return floats(32, powers=True) if module.endswith("v_proj") else floats_of_given_scale


# Where modules differ: what each does to its inputs, if anything. All round to 8-bit floats.
BY_MODULE: dict[str, Callable[[str], Rounding | None]] = {"ct-parts": of_parts, "modelopt-mixed": of_layers}


# What a GPU's sums of products are off by, as part of the root mean square of a row: tensor cores keep 14 bits or so of
# those of 8-bit floats (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
OFF = {"floats": 1e-4, "others": 1e-5}
MORE = 1.25
# One draw of such sums is up to a tenth nearer to the model than another.
DRAWS = 4


@dataclass(frozen=True)
class Distance:
    """Mean Kullback-Leibler divergence over the tokens that are reported, and mean |Δ log-probability| of the
    likeliest."""

    divergence: float
    mean: float

    def within(self, limit: Distance) -> bool:
        return self.divergence <= limit.divergence and self.mean <= limit.mean


ON_A_CPU = Distance(1.5e-3, 0.02)


CASES = [
    pytest.param(SHAPE, packing, id=packing.name) for packing in PACKINGS if packing.name in {*ROUNDINGS, *BY_MODULE}
]


def distance(sequences: list[Sequence], played: list[list[TokenLogprobs]]) -> Distance:
    divergences = []
    for sequence, entries in zip(sequences, played, strict=True):
        for whole, entry in zip(sequence.logprobs["float32"], entries, strict=True):
            ids, values = np.unique(entry.ids, return_index=True)
            found = np.asarray(entry.logprobs)[values]
            divergences.append(float((np.exp(whole[ids]) * (whole[ids] - found)).sum()))
    return Distance(float(np.mean(np.abs(divergences))), judge(sequences, played, "float32").mean)


def play(truth: Golden, shape: Shape, activations: str, device: str) -> Distance:
    """How far the engine is from what was said."""
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=300,
        scheduler=SchedulerConfig(max_rows=12, token_budget=4096),
        cache=CacheConfig(block_size=shape.block_size, num_blocks=4096 // shape.block_size),
        runtime=RuntimeConfig(device=device, dtype="float32"),  # type: ignore[arg-type]
        weights=WeightsConfig(activations=activations),  # type: ignore[arg-type]
    )
    engine = Engine(build_runner(config), config).start()
    try:
        return distance(truth.sequences, EnginePlayer(engine).play(truth.sequences))
    finally:
        engine.close()


def reported(logprobs: np.ndarray) -> TokenLogprobs:
    """The likeliest tokens of a position, as an engine reports them behind the one that it drew."""
    ids = np.argsort(-logprobs)[:NUM_LOGPROBS]
    return TokenLogprobs([int(i) for i in (ids[0], *ids)], [float(logprobs[i]) for i in (ids[0], *ids)], [])


def off_by(model: torch.nn.Module, layers: list[torch.nn.Module], truth: Golden, part: float, seed: int) -> Distance:
    """How far the model is from itself when products are off by `part` of the root mean square of a row."""
    generator = torch.Generator().manual_seed(seed)

    def disturbed(_: torch.nn.Module, given: object, y: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(y.shape, generator=generator)
        return y + part * noise * y.square().mean(-1, keepdim=True).sqrt()

    hooks = [layer.register_forward_hook(disturbed) for layer in layers]
    said_then = [[reported(position) for position in said(model, one)] for one in truth.sequences]
    for hook in hooks:
        hook.remove()
    return distance(truth.sequences, said_then)


@pytest.mark.xdist_group(SHAPE.name)
@pytest.mark.parametrize(("shape", "packing"), CASES)
def test_inputs_are_rounded_as_the_checkpoint_says(
    shape: Shape, packing: Packing, pytestconfig: pytest.Config, device: str
) -> None:
    cache, shape = Path(pytestconfig.rootpath) / ".cache" / "gate", quick(shape)
    base = golden(shape, cache)
    folder = packed_golden(shape, base, packing, cache).folder
    _, plain = tensors_of(base, packing)
    model = model_of(base, plain)
    found = {module: layer for module, layer in model.named_modules() if f"{module}.weight".endswith(PROJECTIONS)}
    layers = list(found.values())
    for module, layer in found.items():
        rounding = BY_MODULE[packing.name](module) if packing.name in BY_MODULE else ROUNDINGS[packing.name]
        if rounding is not None:
            layer.register_forward_pre_hook(lambda _, given, rounding=rounding: (rounding(given[0]),))
    sequences = [
        Sequence(one.prompt, one.forced, {"float32": said(model, one)}) for one in base.sequences[: 4 * PLAYED : 4]
    ]
    truth = Golden(folder, sequences, sequences[-1])
    limit = ON_A_CPU
    if device != "cpu":
        part = OFF["floats" if "fp8" in packing.name or packing.name in BY_MODULE else "others"]
        itself = [off_by(model, layers, truth, part, seed) for seed in range(DRAWS)]
        limit = Distance(MORE * max(one.divergence for one in itself), MORE * max(one.mean for one in itself))
    played = play(truth, shape, "auto", device)
    assert played.within(limit), f"{played}, where {limit} is allowed"
    bare = play(truth, shape, "16bit", device)
    assert not bare.within(limit), "it would not be seen that inputs stay as they are"
