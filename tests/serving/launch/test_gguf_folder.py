"""The checkpoint folder of a GGUF file holds what the file says of the model, and links to it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.serving.frontend import description
from engine.serving.launch import gguf_folder
from tests import gguf_files

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def write(file: Path, **sampling: float) -> Path:
    writer = gguf.GGUFWriter(str(file), "qwen3")
    gguf_files.describe(writer, CONFIG)
    gguf_files.add_tokenizer(writer, 512)
    for key, value in sampling.items():
        writer.add_float32(f"general.sampling.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((512, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [({"temp": 0.6, "top_p": 0.95, "mirostat_tau": 5.0}, {"temperature": 0.6, "top_p": 0.95}), ({}, {})],
)
def test_sampling_that_a_file_recommends_is_the_models_own(
    tmp_path: Path, sampling: dict[str, float], wanted: dict[str, float]
) -> None:
    file, folder = write(tmp_path / "small.gguf", **sampling), tmp_path / "checkpoint"
    folder.mkdir()
    gguf_folder.write(file, folder)
    assert description.sampling(folder) == wanted
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    assert (folder / file.name).resolve() == file
