"""Settings of a model from config.pbtxt's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.serving.settings import FrontendConfig, SettingsError, keys, parse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "models" / "m").mkdir(parents=True)
    return tmp_path / "models" / "m"


def test_relative_paths_are_relative_to_the_models_folder(folder: Path) -> None:
    settings = parse({"model": "../../checkpoint"}, folder)
    assert Path(settings.engine.model) == settings.tokenizer == (folder / "../../checkpoint").resolve()


def test_every_engine_setting_can_be_reached(folder: Path) -> None:
    assert {"model", "cache.num_blocks", "scheduler.max_rows", "runtime.overlap"} <= set(keys(EngineConfig))
    settings = parse({"model": "../../checkpoint", "cache.num_blocks": "64", "runtime.overlap": "false"}, folder)
    assert settings.engine.cache.num_blocks == 64
    assert settings.engine.runtime.overlap is False


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, "no parameter 'model'"),
        ({"model": "../nowhere"}, "there is no checkpoint folder"),
        ({"model": "../../checkpoint", "num_blocks": "3"}, "did you mean 'cache.num_blocks'?"),
        ({"model": "../../checkpoint", "cache.num_blocks": "many"}, "num_blocks"),
        ({"model": "../../checkpoint", "stream_interval": "0"}, "stream_interval"),
    ],
)
def test_refusals_name_the_parameter(folder: Path, parameters: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(parameters, folder)
    assert sentence in str(caught.value)


def test_what_the_python_backend_reads_is_left_to_it(folder: Path) -> None:
    assert parse({"model": "../../checkpoint", "EXECUTION_ENV_PATH": "x"}, folder).frontend.stream_interval == 1


def test_every_setting_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    for key in [*keys(EngineConfig), *keys(FrontendConfig)]:
        group, dot, leaf = key.rpartition(".")
        assert f"`{key}`" in page or (group in page and f"`{dot}{leaf}`" in page), key
