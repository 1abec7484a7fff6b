"""Each family's special part, broken: the gate must see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.layers.sparse import Compressor
from engine.models import registry
from engine.models.config import ModelConfig
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from tests.gate import families
from tests.gate.conftest import QUICK_SEQUENCES, keep, quick
from tests.gate.oracle import golden
from tests.gate.plans import PlanPlayer
from tests.gate.shapes import Shape
from tests.gate.verdict import judge

# A break changes what is built (its config) or what was built (the runner).
Rewrite = Callable[[ModelConfig], ModelConfig]
Damage = Callable[[DeviceRunner], None]


def every_mixer(**changes: Any) -> Rewrite:
    """Fields of each mixer that has them."""

    def rewrite(config: ModelConfig) -> ModelConfig:
        layers = []
        for layer in config.layers:
            mine = {key: value for key, value in changes.items() if hasattr(layer.mixer, key)}
            mine = {key: value(layer.mixer) if callable(value) else value for key, value in mine.items()}
            layers.append(replace(layer, mixer=replace(layer.mixer, **mine)))
        return replace(config, layers=tuple(layers))

    return rewrite


def every_ffn(**changes: Any) -> Rewrite:
    def rewrite(config: ModelConfig) -> ModelConfig:
        layers = [
            replace(layer, ffn=replace(layer.ffn, **{k: v for k, v in changes.items() if hasattr(layer.ffn, k)}))
            for layer in config.layers
        ]
        return replace(config, layers=tuple(layers))

    return rewrite


def window_off_by_one(mixer: Any) -> int | None:
    return mixer.window and mixer.window - 1


def zero(parameter: str) -> Damage:
    """Fills every parameter of that name with zeros."""

    def damage(runner: DeviceRunner) -> None:
        hit = [p for name, p in runner._decoder.named_parameters() if name.endswith(parameter)]
        assert hit
        for p in hit:
            p.zero_()

    return damage


def forgetful(call: Any, state: str = "state") -> Any:
    """The op with that argument zeroed before each call."""
    names = list(inspect.signature(call).parameters)

    def broken(*inputs: Any, **options: Any) -> Any:
        given = {**dict(zip(names, inputs, strict=False)), **options}
        given[state].zero_()
        return call(**given)

    return broken


def forget(op: str, state: str) -> Damage:
    def damage(runner: DeviceRunner) -> None:
        for layer in runner._decoder.layers:
            ops: Any = layer.mixer._ops
            layer.mixer._ops = SimpleNamespace(**{**vars(ops), op: forgetful(getattr(ops, op), state)})

    return damage


def open_windows_forgotten(runner: DeviceRunner) -> None:
    for module in runner._decoder.modules():
        if isinstance(module, Compressor):
            module._op = forgetful(module._op)


def without_gate(runner: DeviceRunner) -> None:
    for layer in runner._decoder.layers:
        ops: Any = layer.mixer._ops
        layer.mixer._ops = SimpleNamespace(**{**vars(ops), "sigmoid_gate": lambda x, gate: x})


def another_ratio(runner: DeviceRunner) -> None:
    """Entries are made as they should be, and read as if each stood for twice as many tokens."""
    for layer in runner._decoder.layers:
        if layer.mixer.config.ratio:
            layer.mixer.config = replace(layer.mixer.config, ratio=2 * layer.mixer.config.ratio)


def rolled_table(runner: DeviceRunner) -> None:
    for layer in runner._decoder.layers:
        if layer.ffn.table is not None:
            layer.ffn.table.copy_(layer.ffn.table.roll(1, dims=0))


def plain_hyper(config: ModelConfig) -> ModelConfig:
    assert config.hyper is not None
    return replace(config, hyper=replace(config.hyper, iterations=1))


BREAKS: list[tuple[Shape, str, Rewrite | None, Damage | None]] = [
    (families.MISTRAL, "window off by one", every_mixer(window=window_off_by_one), None),
    (families.QWEN3_MOE, "weights not renormalised", every_ffn(renormalize=False), None),
    (families.QWEN3_MOE, "one expert fewer", every_ffn(top_k=3), None),
    (families.GEMMA3, "window off by one", every_mixer(window=window_off_by_one), None),
    (families.GEMMA3, "one rotary base", every_mixer(rope=lambda m: replace(m.rope, theta=1e4)), None),
    (families.GEMMA3, "norms not around one", lambda c: replace(c, norm=replace(c.norm, offset=0.0)), None),
    (families.GEMMA3, "embedding not scaled", lambda c: replace(c, embedding_scale=1.0), None),
    (families.GEMMA3, "logits not capped", lambda c: replace(c, logit_softcap=None), None),
    (families.GEMMA3, "scale of the head", every_mixer(scale=256**-0.5), None),
    (families.DEEPSEEK_V2, "no mscale", every_mixer(scale=192**-0.5), None),
    (families.DEEPSEEK_V2, "not stretched", every_mixer(rope=lambda m: replace(m.rope, kind="default")), None),
    (families.DEEPSEEK_V2, "pairs as halves", every_mixer(rope=lambda m: replace(m.rope, interleaved=False)), None),
    (families.KIMI, "bias left out of routing", None, zero("correction")),
    (families.KIMI, "weights not scaled", every_ffn(scale=1.0), None),
    (families.DEEPSEEK_V3, "groups ignored", every_ffn(num_groups=1), None),
    (families.DEEPSEEK_V3, "groups by their best alone", every_ffn(group_score="max"), None),
    (families.QWEN3_5, "convolution not carried", None, forget("delta_net", "conv_state")),
    (families.QWEN3_5, "state not carried", None, forget("delta_net", "state")),
    (families.QWEN3_5, "no output gate", None, without_gate),
    (families.DEEPSEEK_V4, "wrong compress ratio", None, another_ratio),
    (families.DEEPSEEK_V4, "open windows forgotten", None, open_windows_forgotten),
    (families.DEEPSEEK_V4, "no sinks", None, zero("sinks")),
    (families.DEEPSEEK_V4, "window off by one", every_mixer(window=window_off_by_one), None),
    (families.DEEPSEEK_V4, "other experts for a token id", None, rolled_table),
    (families.DEEPSEEK_V4, "bias left out of routing", None, zero("correction")),
    (families.DEEPSEEK_V4, "streams mixed once", plain_hyper, None),
    (families.DEEPSEEK_V4, "gate not clipped", every_ffn(limit=None), None),
    (families.GPT_OSS, "sinks of zero", None, zero("sinks")),
    (families.GPT_OSS, "biases behind experts left out", None, zero("down_bias")),
    (families.GPT_OSS, "biases within experts left out", None, zero("gate_up_bias")),
    (families.GPT_OSS, "bias left out of routing", None, zero("router_bias")),
    (families.GPT_OSS, "gate not clipped", every_ffn(limit=None), None),
    (families.GPT_OSS, "plain gate", every_ffn(activation="silu"), None),
    (families.GPT_OSS, "window off by one", every_mixer(window=window_off_by_one), None),
    (families.GPT_OSS, "stretched by whole channels", every_mixer(rope=lambda m: replace(m.rope, truncate=True)), None),
]


@pytest.mark.parametrize(
    ("broken", "rewrite", "damage"),
    [
        pytest.param(shape, rewrite, damage, id=f"{shape.name}, {name}", marks=pytest.mark.xdist_group(shape.name))
        for shape, name, rewrite, damage in BREAKS
    ],
)
def test_a_broken_part_fails(
    broken: Shape,
    rewrite: Rewrite | None,
    damage: Damage | None,
    device: str,
    dtype: str,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    complete = pytestconfig.getoption("--complete")
    played = broken if complete else quick(broken)
    truth = golden(played, Path(pytestconfig.rootpath) / ".cache" / "gate")
    sequences = truth.sequences[:: played.sequences // QUICK_SEQUENCES]
    if not complete:
        sequences = sequences[2::3]  # from 31 to 255 tokens
    if rewrite is not None:
        config, family = registry.load(truth.folder)
        assert rewrite(config) != config
        monkeypatch.setattr(registry, "load", lambda folder: (rewrite(config), family))
    runner = build_runner(
        EngineConfig(
            model=str(truth.folder),
            max_model_len=320,
            scheduler=SchedulerConfig(max_rows=12, token_budget=4096),
            cache=CacheConfig(block_size=broken.block_size, num_blocks=4096 // broken.block_size),
            runtime=RuntimeConfig(device=device, dtype=dtype, graphs=False),
        )
    )
    with torch.inference_mode():
        if damage is not None:
            damage(runner)
        verdict = judge(sequences, PlanPlayer(runner, chunk=64).play(sequences), dtype)
    keep(request.node, broken.name, dtype, request.node.callspec.id, True, verdict)
    assert not verdict.passes(dtype), verdict
