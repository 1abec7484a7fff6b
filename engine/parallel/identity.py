"""What must be the same on all hosts of a model, as short text that they compare: code, libraries, weights."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from engine.config import EngineConfig
from engine.files import open_regular

PACKAGES = ("torch", "triton", "numpy", "msgspec")
_SAMPLE_BYTES = 1 << 16
_CONFIGS = (
    "config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "model.safetensors.index.json",
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[2]


def code() -> str:
    """Of every source file of engine and kernels, and what kernels go by."""
    digest = hashlib.sha256()
    sources = (("engine", "*.py"), ("kernels", "*.py"), ("kernels", "*.json"))
    for file in sorted(file for folder, kind in sources for file in (_ROOT / folder).rglob(kind)):
        digest.update(f"{file.relative_to(_ROOT)} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def packages() -> dict[str, str]:
    """Versions of the libraries that ranks compute and talk with; "" for one that is missing."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def model(config: EngineConfig) -> str:
    """Of the model's files and of those of what drafts for it: configs whole; of weights names, sizes and samples, for
    all of them would take minutes to read. Raises OSError where a file cannot be read."""
    digest = hashlib.sha256()
    for folder in (config.model, config.speculation.model):
        if folder is not None:
            _checkpoint(digest, Path(folder))
    return digest.hexdigest()


def _checkpoint(digest: hashlib._Hash, folder: Path) -> None:
    files = [file for file in (folder / name for name in _CONFIGS) if file.exists()]
    for file in (*files, *sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.gguf"))):
        with open_regular(file) as stream:
            size = file.stat().st_size
            samples = (0, size // 3, 2 * size // 3, size - _SAMPLE_BYTES)
            # All of a config, which is small.
            places = range(0, size, _SAMPLE_BYTES) if file in files else (max(0, place) for place in samples)
            digest.update(f"{file.name} {size} ".encode())
            for place in places:
                stream.seek(place)
                digest.update(stream.read(_SAMPLE_BYTES))
