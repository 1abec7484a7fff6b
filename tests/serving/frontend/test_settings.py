"""Settings of a model from config.pbtxt's parameters."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import RENAMED, EngineConfig, RuntimeConfig
from engine.serving.frontend.settings import FrontendConfig, SettingsError, keys, parse
from engine.serving.frontend.taken_values import taken_values


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
        (
            {"model": "../../checkpoint", "cache.num_blocks": "many"},
            "parameter 'cache.num_blocks' cannot be 'many': it takes a whole number from 1 to 2,147,483,647",
        ),
        ({"model": "../../checkpoint", "stream_interval": "0"}, "it takes a whole number from 1 to 1,024"),
        ({"model": "../../checkpoint", "runtime.budget_graphs": "on"}, "it takes true, false or auto"),
        ({"model": "../../checkpoint", "hang_timeout_s": "x" * 500}, f"'{'x' * 77}...': it takes a number above 0"),
        ({"model": "../../checkpoint", "served_names": "[3]"}, "a parameter of config.pbtxt cannot be used: Expected"),
    ],
)
def test_refusals_name_the_parameter(folder: Path, parameters: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(parameters, folder)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("config", [EngineConfig, FrontendConfig])
def test_any_refused_value_is_answered_by_what_is_taken(folder: Path, config: type[msgspec.Struct]) -> None:
    lists = {"served_names"}
    for key in keys(config):
        taken = taken_values(config, key.split("."))
        assert (taken is None) == (key in lists), key
        if taken is None or "text" in taken:
            continue
        with pytest.raises(SettingsError) as caught:
            parse({"model": "../../checkpoint", key: "neither"}, folder)
        assert str(caught.value) == f"config.pbtxt: parameter {key!r} cannot be 'neither': it takes {taken}"


def test_what_the_python_backend_reads_is_left_to_it(folder: Path) -> None:
    assert parse({"model": "../../checkpoint", "EXECUTION_ENV_PATH": "x"}, folder).frontend.stream_interval == 1


@pytest.mark.parametrize("value", ["true", "false"])
def test_parameters_of_vllm_backend_are_taken(folder: Path, value: str) -> None:
    parameters = {"REPORT_CUSTOM_METRICS": value, "ENABLE_VLLM_HEALTH_CHECK": value}
    frontend = parse({"model": "../../checkpoint", **parameters}, folder).frontend
    assert (frontend.report_metrics, frontend.vllm_health_check) == (value == "true",) * 2


def test_a_parameter_of_vllm_backend_beside_its_name_here_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="'report_metrics' and its other name 'REPORT_CUSTOM_METRICS'"):
        parse({"model": "../../checkpoint", "REPORT_CUSTOM_METRICS": "true", "report_metrics": "false"}, folder)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_setting_is_taken_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    runtime = parse({"model": "../../checkpoint", f"runtime.{old}": "false"}, folder).engine.runtime
    assert runtime == RuntimeConfig(**{new: False})
    assert [f"runtime.{old}" in line and f"runtime.{new}" in line for line in caplog.messages] == [True]
    assert RuntimeConfig(**{old: False}) == runtime, "in a program too"


def test_a_former_name_is_not_said_again_by_those_that_the_settings_are_handed_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = RuntimeConfig(late_launch=False)
    caplog.clear()
    assert msgspec.json.decode(msgspec.json.encode(runtime), type=RuntimeConfig) == runtime
    assert msgspec.structs.replace(runtime, overlap=False).delay_launch is False
    assert not caplog.messages


def test_a_former_name_beside_another_value_of_the_new_one_is_refused(folder: Path) -> None:
    parameters = {"model": "../../checkpoint", "runtime.late_launch": "true", "runtime.delay_launch": "false"}
    with pytest.raises(SettingsError, match="leave late_launch out"):
        parse(parameters, folder)


def test_every_setting_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environment.md").read_text()
    for key in [*keys(EngineConfig), *keys(FrontendConfig)]:
        group, dot, leaf = key.rpartition(".")
        assert f"`{key}`" in page or (group in page and f"`{dot}{leaf}`" in page), key
