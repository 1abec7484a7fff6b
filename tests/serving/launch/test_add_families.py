"""`nereid add` over the published config of every family: an entry, or a refusal that says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.demo.make import make
from engine.models.registry import FAMILIES
from engine.serving.launch import catalog
from engine.serving.launch.cli import app

REPOSITORY = Path(__file__).parents[3] / "model_repository"
CONFIGS = Path(__file__).parents[2] / "models" / "configs"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that lends its tokenizer to configs without one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make(folder)
    return folder


def add(tokenizer: Path, folder: Path, config: dict[str, object], name: str = "m", frontends: int = 2) -> Result:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "model.safetensors").symlink_to(
        tokenizer / "model.safetensors"
    )  # of other shapes: the load's business
    repository = str(folder / "repository")
    words = ["add", str(checkpoint), "--name", name, "--model-repository", repository, "--frontends", str(frontends)]
    return CliRunner().invoke(app, words)


def said(result: Result) -> str:
    return " ".join(result.output.split())


# Entry of model_repository -> a published config of its family.
ENTRIES = {
    "deepseek-v2-lite": "deepseek-v2-lite",
    "deepseek-v4-flash": "deepseek-v4-flash-bf16",
    "gemma-3-4b": "gemma3-1b",
    "gpt-oss-20b": "gpt-oss-20b",
    "kimi-k2": "kimi-k2-instruct-as-deepseek_v3",
    "llama-3.1-8b": "llama-3.1-8b",
    "mistral-7b": "mistral-7b-v0.3",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-4b": "qwen3-4b",
    "qwen3.5-4b": "qwen3.5-4b",
}
# Of these `test_an_entry_is_what_add_writes_for_a_link_to_a_checkpoint` adds each family's one.
PUBLISHED = [
    pytest.param(file, id=file.stem, marks=pytest.mark.slow if file.stem in ENTRIES.values() else ())
    for file in sorted(CONFIGS.glob("*.json"))
]


@pytest.mark.parametrize("file", PUBLISHED)
def test_published_configs(file: Path, tokenizer: Path, tmp_path: Path) -> None:
    result = add(tokenizer, tmp_path, json.loads(file.read_text()))
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


def test_the_repository_has_an_entry_for_every_family() -> None:
    assert {e.name for e in catalog.entries(REPOSITORY) if e.awaits is not None} == set(ENTRIES)
    configs = [json.loads((CONFIGS / f"{file}.json").read_text()) for file in ENTRIES.values()]
    assert {FAMILIES[config["architectures"][0]] for config in configs} == set(FAMILIES.values())


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_what_add_writes_for_a_link_to_a_checkpoint(name: str, tokenizer: Path, tmp_path: Path) -> None:
    add(tokenizer, tmp_path, json.loads((CONFIGS / f"{ENTRIES[name]}.json").read_text()), name, frontends=4)
    written = (tmp_path / "repository" / name / "config.pbtxt").read_text()
    kept = (REPOSITORY / name / "config.pbtxt").read_text()
    assert kept == written.replace(str(tmp_path / "checkpoint"), "checkpoint")
