"""`nereid add` writes entries that a server can load, or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine import env
from engine.demo.make import make
from engine.serving.launch import catalog, repository
from engine.serving.launch.cli import app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make(folder)
    return folder


def test_add_writes_the_model_its_tokenizer_and_its_ensemble(checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["add", str(checkpoint), "--name", "mine", "--model-repository", str(tmp_path), "--set", "max_model_len=64"],
    )
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "mine_ensemble", "mine_tokenizer"]
    config = (tmp_path / "mine" / "config.pbtxt").read_text()
    assert config == repository.llm_config("mine", {"model": str(checkpoint), "max_model_len": "64"})
    assert "TritonPythonModel" in (tmp_path / "mine" / "1" / "model.py").read_text()
    assert (tmp_path / "mine_ensemble" / "1").is_dir()


def test_add_writes_a_model_that_is_not_decoupled(checkpoint: Path, tmp_path: Path) -> None:
    words = ["add", str(checkpoint), "--name", "m", "--no-decoupled", "--model-repository", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "model_transaction_policy { decoupled: false }" in (tmp_path / "m/config.pbtxt").read_text()


def test_add_writes_tensorrt_llms_names_over_the_one_llm(checkpoint: Path, tmp_path: Path) -> None:
    words = ["add", str(checkpoint), "--name", "m", "--no-ensemble", "--tensorrt-llm-names", "--model-repository"]
    result = CliRunner().invoke(app, [*words, str(tmp_path)])
    assert result.exit_code == 0, result.output
    names = {"ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"}
    assert {p.name for p in tmp_path.iterdir()} == {"m", "m_tokenizer", *names}
    configs = {name: (tmp_path / name / "config.pbtxt").read_text() for name in names}
    assert [name for name in sorted(names) if 'model_name: "m"' in configs[name]] == ["tensorrt_llm"]
    shared = 'key: "engine" value { string_value: "m" }'
    assert [name for name in sorted(names) if shared in configs[name]] == ["ensemble", "tensorrt_llm_bls"]
    assert "Preprocessing as TritonPythonModel" in (tmp_path / "preprocessing/1/model.py").read_text()
    again = CliRunner().invoke(app, [*words[:3], "other", *words[4:], str(tmp_path)])
    assert again.exit_code == 1
    assert "exists already" in " ".join(again.output.split())
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--name", "ensemble", "--tensorrt-llm-names"], "choose another --name"),
        (["--name", "a/b"], "cannot be a model's"),
        (["--name", "m", "--set", "cache.num_block=3"], "did you mean 'cache.num_blocks'?"),
        (["--name", "m", "--set", "nonsense"], "write KEY=VALUE"),
        (["--name", "m" * 300], "use up to 128 letters"),
        (["--name", ""], "the name '' cannot be a model's"),
        (["--set", "max_model_len=64", "--set", "max_model_len=32"], "max_model_len is given twice, as 64 and as 32"),
        (["--served-name", "a", "--set", 'served_names=["b"]'], "served_names is given twice"),
        (["--set", "model=/elsewhere"], "--set model=/elsewhere: the model is CHECKPOINT"),
        (["--set", "tokenizer=nowhere"], "there is no checkpoint folder"),
        (["--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja: there is no such file: give one with"),
        (["--no-tokenizer"], "give --no-ensemble too"),
        (["--no-tokenizer", "--no-ensemble", "--tensorrt-llm-names"], "leave --no-tokenizer out"),
        (["--set", "cache.num_blocks=1"], "cache.num_blocks is 1 and must be 2 or more: one block takes what padding"),
        (["--set", "cache.num_blocks=99999999999999999999"], "it takes a whole number from 1 to 2,147,483,647"),
    ],
)
def test_add_refuses_with_a_sentence_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    result = CliRunner().invoke(app, ["add", str(checkpoint), "--model-repository", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_text_may_be_that_of_another_folder_for_all_entries(checkpoint: Path, tmp_path: Path) -> None:
    weights, text, made = tmp_path / "weights", tmp_path / "text", tmp_path / "r"
    shutil.copytree(checkpoint, weights, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    shutil.copytree(checkpoint, text, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    words = ["add", str(weights), "--name", "m", "--tensorrt-llm-names", "--model-repository", str(made)]
    assert CliRunner().invoke(app, words).exit_code == 1
    result = CliRunner().invoke(app, [*words, "--set", f"tokenizer={text}"])
    assert result.exit_code == 0, result.output
    assert "no chat template" not in result.output
    parameters = {name: catalog.parameters(made / name) for name in ("m", "m_tokenizer", "preprocessing")}
    assert parameters["m"] == {"model": str(weights), "tokenizer": str(text)}
    assert parameters["m_tokenizer"] == parameters["preprocessing"] == {"model": str(text)}


def test_a_setting_that_names_no_other_text_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    words = ["add", str(checkpoint), "--name", "m", "--model-repository", str(tmp_path), "--set", "tokenizer="]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert catalog.parameters(tmp_path / "m_tokenizer") == {"model": str(checkpoint)}


@pytest.mark.parametrize("command", ["add", "serve"])
def test_more_frontends_than_a_machine_has_use_for_are_refused(command: str, checkpoint: Path) -> None:
    """Beside a name that neither command takes, so that nothing is ever written or started."""
    result = CliRunner().invoke(app, [command, str(checkpoint), "--name", "a/b", "--frontends", "100000"])
    assert result.exit_code == 2
    assert "Invalid value for '--frontends'" in result.output
    assert "64" in result.output


def safetensors(header: str, weights: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + weights


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (b"", "c/model.safetensors is empty: fetch it again"),
        (b"{}", "c/model.safetensors is no safetensors file, or it is cut short in its header: fetch it again"),
        (safetensors("{}"), "c/model.safetensors holds no tensor, so there are no weights to serve"),
        (safetensors('{"__metadata__":{"format":"pt"}}'), "c/model.safetensors holds no tensor"),
        (
            safetensors('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234567"),
            "c/model.safetensors is cut short by 1 bytes: fetch it again",
        ),
    ],
)
def test_add_writes_nothing_for_weights_that_are_none(
    checkpoint: Path, tmp_path: Path, held: bytes, sentence: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").write_bytes(held)
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()
    (tmp_path / "c" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "c" / "one.safetensors")  # which alone is read then
    assert CliRunner().invoke(app, words).exit_code == 0


def test_add_writes_nothing_for_a_checkpoint_that_is_not_whole(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    shards = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "c lacks 1 of the 2 files that its index names, model-2.safetensors" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()
    index.write_text("[]")  # which is refused when the model loads
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_add_writes_nothing_for_a_clone_without_its_large_files(checkpoint: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / file).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert f"c/{file} is not the file, and points to it" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


def test_add_writes_nothing_for_weights_that_a_librarys_own_file_says_cannot_be_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "quantize_config.json").write_text('{"bits": 3, "group_size": 128}')
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "quantize_config.json: quantization: bits = 3 is not implemented" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("weights", [None, "folder", "pytorch_model.bin"])
def test_add_writes_nothing_for_a_folder_without_weights(checkpoint: Path, tmp_path: Path, weights: str | None) -> None:
    shutil.copytree(checkpoint, tmp_path / "c", ignore=shutil.ignore_patterns("*.safetensors"))
    if weights == "folder":
        (tmp_path / "c" / "model.safetensors").mkdir()
    elif weights is not None:
        (tmp_path / "c" / weights).touch()
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    held = " (it has .bin)" if weights == "pytorch_model.bin" else ""
    assert f"c holds no *.safetensors file{held}, the one" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()
    assert CliRunner().invoke(app, [*words, "--set", "load_format=dummy"]).exit_code == 0


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_add_writes_nothing_for_a_checkpoint_whose_text_cannot_be_read(
    checkpoint: Path, tmp_path: Path, file: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c", ignore=shutil.ignore_patterns(file))
    (tmp_path / "c" / file).write_text("{")
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert file in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


def test_add_says_a_value_as_it_stands(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps({**config, "hidden_act": "[/red]"}))
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    assert "hidden_act = '[/red]' is not implemented" in " ".join(CliRunner().invoke(app, words).output.split())


def test_what_a_checkpoint_says_does_nothing_to_the_terminal(checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "checkpoint\x1b[2J"
    shutil.copytree(checkpoint, own)
    (own / "chat_template.jinja").write_text("{% \x1b]0;owned\x07 %}")
    result = CliRunner().invoke(app, ["add", str(own), "--name", "m", "--model-repository", str(tmp_path / "r")])
    assert result.exit_code == 1
    assert r"\x1b" in result.output
    assert not {"\x1b", "\x07"} & set(result.output)


def test_add_refuses_a_folder_without_config(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["add", str(tmp_path), "--name", "m", "--model-repository", str(tmp_path / "r")])
    assert result.exit_code == 1
    assert "has no config.json" in " ".join(result.output.split())


def test_add_refuses_a_name_that_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["add", str(checkpoint), "--name", "m", "--model-repository", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "exists already" in " ".join(again.output.split())


def hostile(files: dict[str, str]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="latin-1")

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (hostile({"tokenizer_config.json": '{"a":' * 100_000}), "tokenizer_config.json cannot be read as JSON"),
        (hostile({"config.json": "[" * 100_000}), "config.json cannot be read as JSON"),
        (hostile({"tokenizer.json": '{"a":' * 100_000}), "tokenizer.json is not a tokenizer"),
        (hostile({"chat_template.jinja": "{{ " + "(" * 5000}), "chat template"),
        (hostile({"chat_template.jinja": "{% if a %}" * 5000 + "{% endif %}" * 5000}), "the chat template"),
        (hostile({"chat_template.jinja": "\xff"}), "chat_template.jinja is not valid UTF-8"),
        (hostile({"chat_template.jinja": "x" * (17 << 20)}), "it holds more than 16777216 bytes"),
        (pipe("tokenizer_config.json"), "it is no regular file"),
        (pipe("chat_template.jinja"), "it is no regular file"),
        (pipe("config.json"), "has no config.json"),
        (pipe("generation_config.json"), "it is no regular file"),
        (pipe("tokenizer.json"), "no tokenizer.json"),
    ],
)
def test_add_refuses_a_hostile_checkpoint_with_a_sentence(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None], sentence: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    change(tmp_path / "c")
    words = ["add", str(tmp_path / "c"), "--name", "m", "--model-repository", str(tmp_path / "r")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert sentence in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


def test_add_leaves_nothing_where_it_cannot_write_all(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repository, "write_ensemble", full)
    words = ["add", str(checkpoint), "--name", "m", "--model-repository", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "cannot be written to: No space left on device" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["add", "serve"])
def test_a_python_that_cannot_read_templates_is_a_sentence(
    command: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.PYTHON, "/nowhere/python")
    words = [command, str(checkpoint), "--name", "m"]
    result = CliRunner().invoke(app, [*words, "--model-repository", str(tmp_path)] if command == "add" else words)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "/nowhere/python cannot be run (No such file or directory): set NEREID_PYTHON to a Python that has" in said
    assert list(tmp_path.iterdir()) == []
