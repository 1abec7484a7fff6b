"""The environment variables that Nereid reads. Nothing else reads os.environ; `docs/environment.md` explains each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

PYTHON = "NEREID_PYTHON"
RUN_DIR = "NEREID_RUN_DIR"
CACHE_DIR = "NEREID_CACHE_DIR"
PROGRESS = "NEREID_PROGRESS"
OTLP_ENDPOINT = "NEREID_OTLP_ENDPOINT"
THREADS = "OMP_NUM_THREADS"
GPUS = "CUDA_VISIBLE_DEVICES"


class Environment(msgspec.Struct, frozen=True):
    """What the environment says.

    python: interpreter that engine processes run under (a stub's own sys.executable is not one).
    run_dir: sockets and locks of running models; short, because a socket's path has at most 107 bytes.
    cache_dir: the assembled server and other things that can be made again.
    progress: socket address that an engine process reports its loading to; None when nobody watches.
    otlp_endpoint: an OpenTelemetry collector that spans of requests go to; None where there is none.
    threads: of torch on a CPU, which reads the variable itself; None leaves their number to the runner.
    """

    python: Path
    run_dir: Path
    cache_dir: Path
    progress: str | None
    otlp_endpoint: str | None
    threads: str | None


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process, or the one given."""
    env = os.environ if variables is None else variables
    home_cache = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/tmp")) / ".cache")
    return Environment(
        python=Path(env[PYTHON]) if env.get(PYTHON) else _default_python(),
        run_dir=Path(env.get(RUN_DIR) or temporary_folder(env) / f"nereid-{os.getuid()}"),
        cache_dir=Path(env.get(CACHE_DIR) or home_cache / "nereid"),
        progress=env.get(PROGRESS) or None,
        otlp_endpoint=env.get(OTLP_ENDPOINT) or None,
        threads=env.get(THREADS) or None,
    )


def temporary_folder(variables: Mapping[str, str] | None = None) -> Path:
    """Where temporary files go: that of `tempfile`, which refuses one whose disk is full at the moment."""
    env = os.environ if variables is None else variables
    named = [env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)]
    return next((Path(name).absolute() for name in named if os.path.isdir(name)), Path("/tmp"))


def inherited(**changes: str) -> dict[str, str]:
    """The environment for a child process, with `changes`."""
    return {**os.environ, **changes}


def one_gpu(rank: int) -> dict[str, str]:
    """The variable by which a child process sees one GPU alone: the `rank`-th of those that this process sees."""
    seen = [name for name in os.environ.get(GPUS, "").split(",") if name]
    return {GPUS: seen[rank] if rank < len(seen) else "" if seen else str(rank)}


def path_list(name: str) -> list[str]:
    """The entries of a colon-separated variable such as PYTHONPATH."""
    return [entry for entry in os.environ.get(name, "").split(os.pathsep) if entry]


def _default_python() -> Path:
    own = Path(sys.executable) if sys.executable else None
    if own is not None and own.name.startswith("python"):
        return own
    return Path(sys.prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
