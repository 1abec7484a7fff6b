"""What nvidia-smi says, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.serving.launch import gpus
from engine.serving.launch.gpus import Gpu
from tests.gate.shapes import SHAPES

LISTED = "NVIDIA H200, 143771\nNVIDIA H200, 143771\n"
# The layout of `nvidia-smi topo -m`, with its underlined head.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-15\t0\n"
    "GPU1\tNV18\t X \tPIX\t0-15\t0\n"
    "GPU2\tSYS\tPIX\t X \t0-15\t0\n\nLegend:\n\n  X    = Self\n"
)
SMALL = Gpu("small", 7 << 30)


def test_gpus_and_their_memory() -> None:
    assert gpus.gpus(LISTED) == [Gpu("NVIDIA H200", 143771 << 20)] * 2
    assert gpus.gpus("") == []
    assert gpus.gpus("No devices were found\n") == []


def test_links_between_them() -> None:
    assert gpus.joined(MATRIX) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PIX"}
    assert gpus.joined("") == {}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """8 GB of weights, for all that its folder says: one key-value head of four query heads."""
    values = {**SHAPES[2].config, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(8 * 10**9)
    return tmp_path


@pytest.mark.parametrize(
    ("here", "settings", "said"),
    [
        (0, {}, None),
        (1, {}, "no parallel.tensor up to 1 does: use weights.quantize or larger GPUs"),
        (2, {}, "set parallel.tensor=2"),
        (4, {}, "set parallel.tensor=2"),
        (2, {"parallel.tensor": "2"}, None),
        (2, {"runtime.device": "cpu"}, None),
        (2, {"weights.quantize": "fp8"}, None),
    ],
)
def test_advice_names_the_smallest_setting_that_fits(
    checkpoint: Path, here: int, settings: dict[str, str], said: str | None
) -> None:
    large = Gpu("large", 10 << 30)
    assert gpus.room(large.memory) < 8 * 10**9 < 2 * gpus.room(large.memory)
    advice = gpus.advice(checkpoint, settings, [large] * here)
    assert (said is None and advice is None) or (advice is not None and said is not None and advice.endswith(said))


def test_advice_leaves_out_settings_that_the_model_refuses(checkpoint: Path) -> None:
    """Three ranks would hold it, and five share no four query heads."""
    assert 4 * gpus.room(SMALL.memory) > 8 * 10**9 > 2 * gpus.room(SMALL.memory) > 0
    advice = gpus.advice(checkpoint, {}, [SMALL] * 8)
    assert advice is not None
    assert advice.endswith("set parallel.tensor=3")
    tiny = Gpu("tiny", 5 << 30)
    assert 5 * gpus.room(tiny.memory) < 8 * 10**9 < 8 * gpus.room(tiny.memory)
    advice = gpus.advice(checkpoint, {}, [tiny] * 8)
    assert advice is not None
    assert "no parallel.tensor up to 8 does" in advice
