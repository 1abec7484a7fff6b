"""A checkpoint folder for a GGUF file: config.json and tokenizer files made of its metadata, and links to its tensors.

Everything that serves a model then finds a folder. Weights stay where they are.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

from engine import files
from engine.gguf_file import GgufError, GgufFile, open_gguf
from engine.models.gguf import config, tokenizer

# Divisors of frequencies: one for two channels of a head.
FREQUENCIES = "rope_freqs.weight"
MAX_FREQUENCIES = 4096
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def is_gguf(checkpoint: Path) -> bool:
    """Whether a path names a GGUF file, there or not."""
    return checkpoint.suffix == ".gguf" and not checkpoint.is_dir()


def model_name(checkpoint: Path) -> str:
    """What a model is called after its file."""
    return _SPLIT.sub("", checkpoint.stem)


def write(file: Path, folder: Path) -> None:
    """Fill `folder`. Raises GgufError, ConfigError or RequestError for what cannot be read or is not implemented."""
    file = file.absolute()
    held = open_gguf(file)
    written = {
        "config.json": config.config(held, file.name, tokenizer.end_ids(held.metadata), _frequencies(held)),
        **tokenizer.tokenizer_files(held.metadata),
    }
    sampling = config.generation(held)
    if sampling:
        written["generation_config.json"] = sampling
    for name, values in written.items():
        (folder / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    for part in sorted({file, *(tensor.file for tensor in held.tensors.values())}):
        (folder / part.name).symlink_to(part)


def _frequencies(held: GgufFile) -> tuple[float, ...] | None:
    tensor = held.tensors.get(FREQUENCIES)
    if tensor is None:
        return None
    if tensor.format.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FREQUENCIES:
        raise GgufError(f"{tensor.file}: {FREQUENCIES} must hold up to {MAX_FREQUENCIES} numbers of F32")
    with files.open_regular(tensor.file) as stream:
        stream.seek(tensor.start)
        return struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.num_bytes))
