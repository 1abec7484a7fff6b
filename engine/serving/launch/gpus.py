"""The GPUs of this machine: how large they are, what joins them, and what fits. By nvidia-smi, so without torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.models import registry
from engine.models.reader import ConfigError
from engine.parallel.shard import Shard, shard_config

# Of a GPU's memory: what the engine plans with, and what steps and libraries take beside weights and cache.
USED = 0.9
BESIDE_BYTES = 3 << 30
# Weights are to leave the cache at least so much of what is used.
FOR_CACHE = 0.1
_MIB = 1 << 20
_GB = 10**9
_TIMEOUT_S = 30


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. memory: bytes in all."""

    name: str
    memory: int


def present() -> list[Gpu]:
    """The GPUs that nvidia-smi names; none without it."""
    return gpus(_ask("--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))


def gpus(listed: str) -> list[Gpu]:
    """From nvidia-smi's table: a name and MiB a line."""
    found = (re.fullmatch(r"(.+), (\d+)", line.strip()) for line in listed.splitlines())
    return [Gpu(match[1], int(match[2]) * _MIB) for match in found if match]


def links() -> dict[tuple[int, int], str]:
    """What joins each pair of GPUs, as nvidia-smi calls it (NV18: 18 NVLinks; SYS: across processors)."""
    return joined(_ask("topo", "-m"))


def joined(matrix: str) -> dict[tuple[int, int], str]:
    """From nvidia-smi's matrix of connections."""
    made = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines():
        words = line.split()
        match = re.fullmatch(r"GPU(\d+)", words[0]) if words else None
        if match is None or len(words) < 2 or words[1].startswith("GPU"):
            continue
        own = int(match[1])
        made.update({(own, other): word for other, word in enumerate(words[1 : own + 1])})
    return {(other, own): word for (own, other), word in made.items()}


def room(memory: int) -> int:
    """Bytes of weights that a GPU with `memory` bytes holds beside a cache."""
    return max(0, int((memory * USED - BESIDE_BYTES) * (1 - FOR_CACHE)))


def weights(checkpoint: Path) -> int:
    """Bytes of a checkpoint's weights on disk."""
    return sum(file.stat().st_size for ending in ("safetensors", "gguf") for file in checkpoint.glob(f"*.{ending}"))


def advice(checkpoint: Path, settings: Mapping[str, str], here: list[Gpu]) -> str | None:
    """A sentence when a model with `settings` does not fit the GPUs that it would take; None when it does, when there
    are none, and when it is rounded while it loads."""
    if not here or settings.get("runtime.device") == "cpu" or "weights.quantize" in settings:
        return None
    asked = settings.get("parallel.tensor", "1")
    size, least = weights(checkpoint), min(gpu.memory for gpu in here)
    if not asked.isdigit() or size <= int(asked) * room(least):
        return None
    said = (
        f"its weights take {size / _GB:.0f} GB, and {asked} of the GPUs here hold {int(asked) * room(least) / _GB:.0f}"
    )
    # As `model_source` chooses by "auto".
    ways = {"sliced": (False,), "whole": (True,)}.get(settings.get("parallel.expert", "auto"), (False, True))
    more = range(int(asked) + 1, len(here) + 1)
    fits = next(
        (n for n in more if size <= n * room(least) and any(_shares(checkpoint, n, whole) for whole in ways)), 0
    )
    if fits:
        return f"{said} beside a cache: set parallel.tensor={fits}"
    return f"{said} beside a cache, and no parallel.tensor up to {len(here)} does: use weights.quantize or larger GPUs"


def _shares(checkpoint: Path, size: int, whole_experts: bool) -> bool:
    """Whether the model can be shared out over `size` ranks."""
    try:
        model, _ = registry.load(checkpoint)
        for rank in range(size):
            shard_config(model, Shard(rank, size, whole_experts=whole_experts))
    except ConfigError:
        return False
    return True


def _ask(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
