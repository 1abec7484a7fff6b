"""Whether the files of a checkpoint's weights are there; what they hold is read when the model loads. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from engine import files
from engine.models.reader import ConfigError
from engine.types import shown

_OTHERS = (".bin", ".pt", ".pth")


def check(folder: Path) -> None:
    """Raises ConfigError for a folder without weights, or without some of the files that its index names."""
    named = _indexed(folder / "model.safetensors.index.json")
    lost = [name for name in named if not (folder / name).is_file()]
    if lost:
        raise ConfigError(
            f"{folder} lacks {len(lost)} of the {len(named)} files that its index names, {shown(lost[0])} among them: "
            "fetch it again, or wait until it is whole"
        )
    if any(file.is_file() for end in ("safetensors", "gguf") for file in folder.glob(f"*.{end}")):
        return
    others = sorted({file.suffix for file in folder.iterdir()} & set(_OTHERS))
    held = f" (it has {', '.join(others)})" if others else ""
    raise ConfigError(f"{folder} holds no *.safetensors file{held}, the one format that weights are read from")


def _indexed(index: Path) -> list[str]:
    """The files that an index of weights names; none where it is not there, or is not of its form."""
    try:
        said = json.loads(files.read(index, files.MAX_INDEX_BYTES))
        return sorted({str(name) for name in said["weight_map"].values()})
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return []
