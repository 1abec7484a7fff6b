"""The gate of gpt-oss as it is published: experts of 4-bit floats, whose gates and ups alternate, against transformers'
model of the numbers that they stand for; and that the gate would see them misread."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.models import gpt_oss
from engine.runner.build import build_runner
from kernels.weight import fp4
from tests.gate import test_ranks
from tests.gate.conftest import quick
from tests.gate.families import GPT_OSS
from tests.gate.fp4 import mxfp4
from tests.gate.oracle import Golden, Sequence, golden
from tests.gate.packings import model_of, said
from tests.gate.player import EnginePlayer
from tests.gate.verdict import Verdict, judge

PLAYED = 6
PUBLISHED = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}

pytestmark = pytest.mark.xdist_group(GPT_OSS.name)


@pytest.fixture(scope="module")
def truth(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    base = golden(quick(GPT_OSS), Path(pytestconfig.rootpath) / ".cache" / "gate")
    folder = tmp_path_factory.mktemp("gpt-oss")
    packed, plain = {}, {}
    for name, tensor in load_file(base.folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name], plain[name] = tensor, tensor.float()
            continue
        rows = tensor.float().transpose(1, 2)
        made, numbers = mxfp4("blocks", "scales")(rows.flatten(0, 1))
        plain[name] = numbers.view(rows.shape).transpose(1, 2).contiguous()
        packed[f"{name}_blocks"] = made["blocks"].view(*rows.shape[:2], -1, 16)
        packed[f"{name}_scales"] = made["scales"].view(*rows.shape[:2], -1)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": PUBLISHED}))
    model = model_of(base, plain)
    sequences = [
        Sequence(one.prompt, one.forced, {"float32": said(model, one)}) for one in base.sequences[:: 12 // PLAYED]
    ]
    return Golden(folder, sequences, sequences[-1])


def play(truth: Golden, kernels: str = "auto") -> Verdict:
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=300,
        scheduler=SchedulerConfig(max_rows=12, token_budget=300),
        cache=CacheConfig(num_blocks=256),
        runtime=RuntimeConfig(dtype="float32", kernels=kernels),  # type: ignore[arg-type]
    )
    engine = Engine(build_runner(config), config).start()
    try:
        return judge(truth.sequences, EnginePlayer(engine).play(truth.sequences), "float32")
    finally:
        engine.close()


def test_published_experts_are_the_numbers_that_they_stand_for(truth: Golden) -> None:
    verdict = play(truth)
    assert verdict.passes("float32"), verdict


def test_two_ranks_share_published_experts(truth: Golden) -> None:
    config = test_ranks.of_ranks(truth, GPT_OSS, 2)
    played = test_ranks.play(config, truth)
    assert played[0] == played[1]
    verdict = judge(truth.sequences, played[0], "float32")
    assert verdict.passes("float32"), verdict


def halves(experts: str, part: str, entry: Any, apart: Any = gpt_oss._apart) -> Any:
    """Gates first, then ups."""
    for name, one in apart(experts, part, entry):
        rows = one.shape[0]
        if one.pitch is not None:
            width = one.pitch // 2
            first = one.start if "gate_proj" in name else one.start - width + rows * width
            one = replace(one, start=first, pitch=width)
        yield name, one


def by_value(stored: torch.Tensor) -> torch.Tensor:
    return stored.float() / 127


@pytest.mark.parametrize(
    "change",
    [
        pytest.param((gpt_oss, "_apart", halves), id="gates and ups taken as halves"),
        pytest.param((gpt_oss.Apart, "__call__", lambda self, tensors, view: tensors[0]), id="biases taken as halves"),
        pytest.param((fp4, "scales", by_value), id="exponents by value"),
    ],
)
def test_experts_that_are_misread_fail(
    truth: Golden, change: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*change)
    # what is broken of experts are references
    assert not play(truth, kernels="reference").passes("float32")
