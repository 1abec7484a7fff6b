"""A model that cannot be served does not load, and the load's error names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.serving.launch import repository
from tests.e2e.harness import Call, Server, text_of

WEIGHT = "model.layers.1.mlp.up_proj.weight"


def drop_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(WEIGHT))


def add_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.1.mlp.extra.weight": torch.zeros(3)}))


def misshape_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].contiguous()}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Unheard"}}')


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing_tensor": (drop_tensor, WEIGHT),
    "extra_tensor": (add_tensor, "model.layers.1.mlp.extra.weight"),
    "misshapen_tensor": (misshape_tensor, WEIGHT),
    "unknown_activation": (edit_config(hidden_act="sine"), "hidden_act"),
    "unknown_rope": (edit_config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    "unknown_architecture": (edit_config(architectures=["UnheardOfForCausalLM"], model_type="unheard"), "nheard"),
    "unknown_tokenizer": (break_tokenizer, "is not a tokenizer that the tokenizers library can read"),
    "no_tokenizer": (drop_tokenizer, "holds no tokenizer.json"),
}


# Those that the engine's process finds; each is held to its sentence by the tests of models and weights too.
REPEATED = ("unknown_rope", "unknown_activation", "extra_tensor", "misshapen_tensor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in BROKEN]
)
def test_broken_checkpoint_does_not_load(
    server: Server, models: Path, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    edit, sentence = BROKEN[name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    edit(folder)
    repository.write_llm(models, name, {"model": str(folder)}, frontends=1)
    error = server.load(name)
    assert error is not None
    assert sentence in error
    assert server.engine_pids(name) == []
    assert text_of(Call(server, text_input="still here", max_tokens=2, stream=True).all()) is not None


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("num_blocks", "8", "unknown parameter 'num_blocks': did you mean 'cache.num_blocks'?"),
        ("cache.block_size", "17", "block_size"),
        ("cache.dtype", "fp8_e5m2", "cache.dtype 'fp8_e5m2' is not there: it is auto, fp8 (fp8_e4m3) or 16bit"),
        ("runtime.device", "abacus", "device"),
        ("max_model_len", "100000", "100000"),
        ("speculation.method", "medusa", "'medusa' is not there: it is none, ngram, suffix, draft"),
        ("stream_interval", "0", "stream_interval"),
    ],
)
def test_setting_that_cannot_be_honoured_is_refused(
    server: Server, models: Path, checkpoint: Path, key: str, value: str, sentence: str
) -> None:
    name = f"setting_{key.replace('.', '_')}"
    repository.write_llm(models, name, {"model": str(checkpoint), key: value}, frontends=1)
    error = server.load(name)
    assert error is not None
    assert sentence in error


@pytest.mark.parametrize("tokenizer", [False, True], ids=["engine", "tokenizer"])
def test_text_of_a_checkpoint_does_nothing_to_the_servers_log(
    server: Server, models: Path, checkpoint: Path, tmp_path: Path, tokenizer: bool
) -> None:
    """tritonserver 2.51 escapes what is ASCII in its log by itself, and that can be turned off."""
    folder = tmp_path / "a\u202eb\x9bc"
    shutil.copytree(checkpoint, folder)
    (folder / ("tokenizer.json" if tokenizer else "config.json")).unlink()
    name = f"hostile_{'tokenizer' if tokenizer else 'engine'}"
    if tokenizer:
        repository.write_tokenizer(models, name, {"model": str(folder)})
    else:
        repository.write_llm(models, name, {"model": str(folder)}, frontends=1)
    error = server.load(name)
    assert error is not None
    assert r"a\\u202eb\\x9bc" in error
    assert not {"\u202e", "\x9b"} & set(error + server.log.read_text())


def test_missing_checkpoint_folder_is_named(server: Server, models: Path) -> None:
    repository.write_llm(models, "nowhere", {"model": "/no/such/folder"}, frontends=1)
    error = server.load("nowhere")
    assert error is not None
    assert "there is no checkpoint folder /no/such/folder" in error
