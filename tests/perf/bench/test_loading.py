"""The measurement of loading, on checkpoints of every format that is made for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from engine.models.gguf.names import open_folder
from perf import checkpoints
from perf.bench import loading

CONFIGS = Path(__file__).parents[2] / "models" / "configs"
SMALL = {"gb": 0.001, "vocab": 64, "layers": 1}


def test_plain_reads_and_the_loader_alternate_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = checkpoints.write(tmp_path, "tiny", **SMALL), tmp_path / "out.jsonl"
    words = ["loading", "measure", str(folder), "--runs", "1", "--json", str(out), "--cold"]
    monkeypatch.setattr(sys, "argv", [*words, "--set", "weights.quantize=int8"])
    loading.main()
    said, written = json.loads(capsys.readouterr().out), json.loads(out.read_text())
    assert said.items() <= written.items()
    assert said["checkpoint"] == "tiny"
    assert said["settings"] == ["weights.quantize=int8"]
    assert said["gb"] == round(open_folder(folder).num_bytes / 1e9, 3)
    assert said["low"] <= said["share"] <= said["high"]
    assert "commit" in written


@pytest.mark.slow
def test_ranks_load_their_slices(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, "tiny", **SMALL)
    figures = loading.measure(folder, ["parallel.tensor=2"], 1, cold=False)
    assert figures["settings"] == ["parallel.tensor=2"]
    assert figures["share"] > 0


def published(folder: Path, name: str, **changes: object) -> str:
    """A published config with other sizes, as a file."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**json.loads((CONFIGS / file.name).read_text()), **changes}))
    return str(file)


WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
V4 = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 8, "num_attention_heads": 8}


@pytest.mark.parametrize("quantization", ["fp8", "fp8-rows", "w4a16", "awq", "gptq", "gptq-order", "q4_k"])
def test_a_checkpoint_of_every_quantization_is_what_the_loader_takes(tmp_path: Path, quantization: str) -> None:
    sizes = {**WIDE, "hidden_size": 512, "intermediate_size": 512}
    loads(tmp_path, f"{published(tmp_path, 'llama-3.2-1b', **sizes)}:{quantization}")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt-oss-20b", {**WIDE, "intermediate_size": 256, "num_local_experts": 4}), ("qwen3-8b-fp8", WIDE)],
)
def test_so_is_one_of_a_config_that_says_its_own(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    loads(tmp_path, published(tmp_path, name, **sizes))


def test_experts_of_deepseek_v4_are_in_4_bits_and_the_rest_in_8(tmp_path: Path) -> None:
    folder = loads(tmp_path, published(tmp_path, "deepseek-v4-flash", **V4))
    kinds = {
        ".experts." in name: e.dtype for name, e in open_folder(folder).entries.items() if name.endswith("w1.weight")
    }
    assert kinds == {True: torch.int8, False: torch.float8_e4m3fn}


def loads(folder: Path, shape: str) -> Path:
    """A checkpoint of that shape, which the loader took."""
    made = checkpoints.write(folder, shape, **SMALL)
    config = loading.config_from(str(made), [*loading.ALONE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_wait", loading.time.perf_counter)
        assert loading.load(config, 0)["seconds"] > 0
    return made
