"""`nereid add` over the published config of every family: an entry, or a refusal that says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.demo.make import make
from engine.models.registry import FAMILIES
from engine.serving.cli import app

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
QUANTIZED = {"qwen3-8b-fp8", "kimi-k2-instruct", "deepseek-v4-flash"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that lends its tokenizer to configs without one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make(folder)
    return folder


def add(tokenizer: Path, folder: Path, config: dict[str, object]) -> Result:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config))
    repository = str(folder / "repository")
    return CliRunner().invoke(app, ["add", str(checkpoint), "--name", "m", "--model-repository", repository])


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_published_configs(file: Path, tokenizer: Path, tmp_path: Path) -> None:
    result = add(tokenizer, tmp_path, json.loads(file.read_text()))
    if file.stem in QUANTIZED:
        assert result.exit_code == 1
        assert "quantization_config" in said(result)
        assert not (tmp_path / "repository").exists()
        return
    assert result.exit_code == 0, result.output
    written = (tmp_path / "repository" / "m" / "config.pbtxt").read_text()
    # Entries of 128 tokens need blocks of as many.
    assert ('"cache.block_size" value { string_value: "128" }' in written) == file.stem.startswith("deepseek-v4")


def test_an_unknown_model_is_refused_with_the_list_of_known_ones(tokenizer: Path, tmp_path: Path) -> None:
    result = add(tokenizer, tmp_path, {"architectures": ["FalconForCausalLM"]})
    assert result.exit_code == 1
    assert all(name in said(result) for name in ("FalconForCausalLM", *FAMILIES))


def test_a_value_that_is_not_implemented_is_named(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "deepseek-v2-lite.json").read_text())
    result = add(tokenizer, tmp_path, {**config, "scoring_func": "tanh"})
    assert result.exit_code == 1
    assert "scoring_func = 'tanh' is not implemented" in said(result)
