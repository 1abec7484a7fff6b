"""How a server is found and started, without starting one."""

from __future__ import annotations

import io
import shutil
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from engine import env
from engine.serving.launch import catalog, launcher, repository, serve_loop
from engine.serving.launch.cli import app
from engine.serving.link.messages import Progress


def test_command_line_and_environment_of_the_embedded_server(tmp_path: Path) -> None:
    server = launcher.embedded_server(tmp_path)
    options = launcher.Options(repository=tmp_path, models=("a", "b"), http_port=1, grpc_port=2, metrics_port=3)
    words = launcher.command(server, options)
    assert words[0] == str(server.binary)
    assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3", "--load-model=a", "--load-model=b"} <= set(words)
    assert "--backend-config=python,thread-pool-size=4" in words
    stub = server.backends / "python" / "triton_python_backend_stub"
    assert stub.stat().st_mode & 0o111
    variables = launcher.environment(server)
    assert variables["LD_LIBRARY_PATH"].startswith(str(server.library_path[0]))
    assert str(Path(launcher.__file__).parents[3]) in variables["PYTHONPATH"].split(":")


def test_the_engine_runs_under_the_python_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = launcher.embedded_server(tmp_path)
    monkeypatch.delenv(env.PYTHON, raising=False)
    assert launcher.environment(server)[env.PYTHON] == sys.executable
    other = tmp_path / "python-under-a-profiler"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(env.PYTHON, f"../{tmp_path.name}/{other.name}")
    variables = launcher.environment(server)
    assert Path(variables[env.PYTHON]).is_absolute()  # the server starts in another folder
    assert Path(variables[env.PYTHON]).samefile(other)
    launcher.check_python(variables)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "No such file or directory"),
        ("#!/bin/sh\n", "it is no Python"),
        ("#!/bin/sh\necho No module named msgspec >&2\n", "No module named msgspec"),
        ("#!/bin/sh\necho 2.7\n", "it is Python 2.7"),
    ],
)
def test_a_python_that_cannot_run_the_engine_is_a_sentence(
    program: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python"
    if program is not None:
        other.write_text(program)
        other.chmod(0o755)
    monkeypatch.setenv(env.PYTHON, str(other))
    sentence = rf"NEREID_PYTHON is '{other}', which cannot run the engine \({why}\): unset it, or set it to a Python 3"
    with pytest.raises(launcher.LaunchError, match=sentence):
        launcher.check_python(launcher.environment(launcher.embedded_server(tmp_path / "cache")))


def test_a_metrics_port_of_0_is_none(tmp_path: Path) -> None:
    options = launcher.Options(repository=tmp_path, models=("a",), http_port=1, grpc_port=2, metrics_port=0)
    words = launcher.command(launcher.embedded_server(tmp_path), options)
    assert "--allow-metrics=false" in words
    assert not any(word.startswith("--metrics") for word in words)


def test_where_the_server_answers_is_one_line_in_a_narrow_log_too(tmp_path: Path) -> None:
    log = io.StringIO()
    serve_loop.greet(launcher.Options(repository=tmp_path), Console(file=log, width=40))
    (line,) = log.getvalue().splitlines()
    assert line.startswith("ready: HTTP http://")
    assert line.endswith(":8002/metrics  (Ctrl-C stops)")


def test_backend_folder_is_assembled_once(tmp_path: Path) -> None:
    first = launcher.embedded_server(tmp_path)
    marker = first.backends / "python" / "marker"
    marker.touch()
    assert launcher.embedded_server(tmp_path) == first
    assert marker.exists()


def test_containers_own_server_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch(mode=0o755)
    (tmp_path / "backends" / "python").mkdir(parents=True)
    monkeypatch.setattr(launcher, "CONTAINER_SERVER", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: str(binary))
    server = launcher.find_server()
    assert (server.binary, server.embedded, server.library_path) == (binary, False, ())


def test_without_any_server_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(launcher.LaunchError, match=r"nereid\[server\]"):
        launcher.embedded_server(tmp_path)


def test_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(launcher.LaunchError, match="Set NEREID_CACHE_DIR to a folder that can be written"):
        launcher.embedded_server(tmp_path / "file")


def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    with pytest.raises(launcher.LaunchError, match=r"numpy 2\.1\.0 is installed"):
        launcher.check_numpy()


def test_repository_without_what_is_asked_for_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(launcher.LaunchError, match="is not a folder"):
        launcher.start(launcher.Options(repository=tmp_path / "nowhere"))
    with pytest.raises(launcher.LaunchError, match="holds no model: write one with `nereid add"):
        launcher.start(launcher.Options(repository=tmp_path))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.pbtxt").touch()
    with pytest.raises(launcher.LaunchError, match=r"no model 'dem' in .*: there are demo"):
        launcher.start(launcher.Options(repository=tmp_path, models=("dem",)))


def test_entries_without_their_checkpoint_are_left_out(tmp_path: Path) -> None:
    for name, place in (("here", "checkpoint"), ("waits", "checkpoint"), ("astray", "/nowhere")):
        (tmp_path / name).mkdir()
        config = f'parameters [ {{ key: "model" value {{ string_value: "{place}" }} }} ]'
        (tmp_path / name / "config.pbtxt").write_text(config)
    options = launcher.Options(repository=tmp_path)
    with pytest.raises(launcher.LaunchError, match="waits for its checkpoint: copy it, or make a link to it, at "):
        launcher.check_models(launcher.Options(repository=tmp_path, models=("waits",)))
    (tmp_path / "here" / "checkpoint").mkdir()
    words = launcher.command(launcher.embedded_server(tmp_path / "cache"), options)
    # A path that leads nowhere is a mistake, which the server is to report.
    assert [word for word in words if "load-model" in word] == ["--load-model=astray", "--load-model=here"]
    shutil.rmtree(tmp_path / "astray")
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(launcher.LaunchError, match=r"no model of .* has its checkpoint: put one at "):
        launcher.check_models(options)


def test_settings_that_a_model_refuses_are_said_once_before_a_server_starts(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path), "served_names": '["a", "b\\"c"]', "cache.num_blocks": "16"}
    repository.write_llm(tmp_path, "demo", settings)
    assert catalog.llm_parameters(tmp_path / "demo") == settings
    launcher.check_settings(launcher.Options(repository=tmp_path))
    config = tmp_path / "demo" / "config.pbtxt"
    wrong = config.read_text().replace('"cache.num_blocks"', '"cache.num_blokcs"')
    config.write_text(f'# {{ key: "dreams" value {{ string_value: "1" }} }}\n{wrong}')
    repository.write_llm(tmp_path, "other", {"model": str(tmp_path)})
    repository.write_tokenizer(tmp_path, "tokenizer", {"model": "/nowhere", "dreams": "1"})
    with pytest.raises(launcher.LaunchError) as said:
        launcher.start(launcher.Options(repository=tmp_path))
    sentence = "config.pbtxt has an unknown parameter 'cache.num_blokcs': did you mean 'cache.num_blocks'?"
    assert str(said.value) == f"model demo: {sentence}"
    launcher.check_settings(launcher.Options(repository=tmp_path, models=("other",)))


def test_port_in_use_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.pbtxt").touch()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(launcher.LaunchError, match=rf"port {port} cannot be used .*: give another --grpc-port"):
            launcher.start(launcher.Options(repository=tmp_path, http_port=0, grpc_port=port, metrics_port=0))


@pytest.mark.parametrize(
    "words", [["--http-port", "70000"], ["--grpc-port", "0"], ["--metrics-port", "-1"], ["--exit-timeout-secs", "-5"]]
)
def test_numbers_out_of_range_are_a_sentence(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 2
    assert f"Invalid value for '{words[0]}'" in result.output


def test_two_ports_that_are_the_same_are_a_sentence(tmp_path: Path) -> None:
    options = launcher.Options(repository=tmp_path, http_port=1, grpc_port=2, metrics_port=2)
    with pytest.raises(launcher.LaunchError, match="--grpc-port and --metrics-port are both 2: give each its own"):
        launcher.check_ports(options)


def test_an_empty_address_is_not_every_address(tmp_path: Path) -> None:
    with pytest.raises(launcher.LaunchError, match=r"--host is empty: .* leave it out for 0\.0\.0\.0"):
        launcher.check_ports(launcher.Options(repository=tmp_path, host=""))


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("192.0.2.1", "this machine has no such address"),
        ("no such name", "no IPv4 address and no name of one"),
        ("a..b", "no IPv4 address and no name of one"),
    ],
)
def test_an_address_that_is_not_this_machines_is_a_sentence(tmp_path: Path, host: str, says: str) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.pbtxt").touch()
    with pytest.raises(launcher.LaunchError, match=f"--host {host}: .*{says}"):
        launcher.start(launcher.Options(repository=tmp_path, host=host, http_port=0, grpc_port=0, metrics_port=0))


def test_a_server_is_asked_where_it_listens(tmp_path: Path) -> None:
    told = {host: launcher.Options(repository=tmp_path, host=host) for host in ("0.0.0.0", "127.0.0.2", "localhost")}
    assert {host: (o.address, o.own_address) for host, o in told.items()} == {
        "0.0.0.0": ("0.0.0.0", "127.0.0.1"),
        "127.0.0.2": ("127.0.0.2", "127.0.0.2"),
        "localhost": ("127.0.0.1", "127.0.0.1"),
    }


def test_load_failures_are_read_from_the_servers_log() -> None:
    reason = r"Internal: TritonModelException: there is no checkpoint folder /x\n\nAt:\n  /y/llm_model.py(8): load"
    lines = [
        f"E1120 model_lifecycle.cc:642] \"failed to load 'demo' version 1: {reason}\"",
        "I1120 model_lifecycle.cc:777] \"failed to load 'demo'\"",
        "I1120 model_lifecycle.cc:839] \"successfully loaded 'tokenizer'\"",
    ]
    assert serve_loop.load_failures(lines) == ["model demo: there is no checkpoint folder /x"]


def test_a_failure_that_the_server_died_of_is_told_of_the_models_that_were_being_loaded() -> None:
    reason = "Stub process 'demo_1_0' is not healthy."
    loads = [f'I1120 model_lifecycle.cc:472] "loading: {name}:1"' for name in ("tokenizer", "demo", "other")]
    loaded = "I1120 model_lifecycle.cc:839] \"successfully loaded 'tokenizer'\""
    failed = f"E1120 model_lifecycle.cc:642] \"failed to load 'demo' version 1: Internal: {reason}\""
    instance = f'E1120 backend_model.cc:692] "ERROR: Failed to create instance: {reason}"'
    assert serve_loop.load_failures([*loads, loaded, instance]) == [f"model demo or other: {reason}"]
    assert serve_loop.load_failures([*loads, loaded, instance, failed]) == [f"model demo: {reason}"]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (Progress("m", "weights", 5 << 20, 10 << 20, "bytes"), "5 of 10 MiB"),
        (Progress("m", "graphs", 3, 9), "3 of 9"),
        (Progress("m", "import torch", 0, 0), ""),
    ],
)
def test_progress_is_shown_for_people(report: Progress, text: str) -> None:
    assert serve_loop.amount(report) == text


@pytest.mark.parametrize(("gpu", "frontends"), [(True, 4), (False, 2)])
def test_a_new_model_has_more_frontends_where_a_gpu_feeds_them(
    gpu: bool, frontends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "has_gpu", lambda: gpu)
    assert launcher.default_frontends() == frontends
