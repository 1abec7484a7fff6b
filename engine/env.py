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
# By default torch takes the GPUs of ranks that each see one for the same.
ONE_GPU_EACH = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# What torchrun tells the processes that it starts, and by what name LeaderWorkerSet says the same to a pod.
RANKS = {
    "MASTER_ADDR": "LWS_LEADER_ADDRESS",
    "RANK": "LWS_WORKER_INDEX",
    "WORLD_SIZE": "LWS_GROUP_SIZE",
}


class Launched(msgspec.Struct, frozen=True):
    """What a launcher of processes on several hosts says of this one, as text; None where it says nothing.

    own_store: the launcher itself listens at the port, as torchrun does.
    """

    master_addr: str | None = None
    master_port: str | None = None
    rank: str | None = None
    world_size: str | None = None
    local_rank: str | None = None
    local_world_size: str | None = None
    own_store: bool = False


class Environment(msgspec.Struct, frozen=True):
    """What the environment says.

    python: interpreter that engine processes run under (a stub's own sys.executable is not one).
    run_dir: sockets and locks of running models; short, because a socket's path has at most 107 bytes.
    cache_dir: the assembled server and other things that can be made again.
    progress: socket address that an engine process reports its loading to; None when nobody watches.
    otlp_endpoint: an OpenTelemetry collector that spans of requests go to; None where there is none.
    threads: of torch on a CPU, which reads the variable itself; None leaves their number to the runner.
    launched: what a launcher of several processes says.
    """

    python: Path
    run_dir: Path
    cache_dir: Path
    progress: str | None
    otlp_endpoint: str | None
    threads: str | None
    launched: Launched


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
        launched=_launched(env),
    )


def _launched(env: Mapping[str, str]) -> Launched:
    """torchrun may run in a pod of LeaderWorkerSet: then its word counts, for it says more."""
    pod = not env.get("WORLD_SIZE") and bool(env.get("LWS_GROUP_SIZE"))
    said = {name: env.get(other if pod else name) or None for name, other in RANKS.items()}
    return Launched(
        master_addr=said["MASTER_ADDR"],
        master_port=env.get("MASTER_PORT") or None,
        rank=said["RANK"],
        world_size=said["WORLD_SIZE"],
        local_rank=None if pod else env.get("LOCAL_RANK") or None,
        local_world_size=None if pod else env.get("LOCAL_WORLD_SIZE") or None,
        own_store=not pod and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def temporary_folder(variables: Mapping[str, str] | None = None) -> Path:
    """Where temporary files go: that of `tempfile`, which refuses one whose disk is full at the moment."""
    env = os.environ if variables is None else variables
    named = [env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)]
    return next((Path(name).absolute() for name in named if os.path.isdir(name)), Path("/tmp"))


def inherited(**changes: str) -> dict[str, str]:
    """The environment for a child process, with `changes`."""
    return {**os.environ, **changes}


def let_ranks_have_one_gpu_each() -> None:
    """Tells torch's symmetric memory that ranks of which each sees one GPU, by the same number, have different ones,
    and to make no NVLink multicast."""
    os.environ[ONE_GPU_EACH] = os.environ[NO_MULTICAST] = "1"


def one_gpu(index: int, taken: int = 0, own: int = 0) -> dict[str, str]:
    """The variable by which a child process sees one GPU alone: the `index`-th of those that this process sees.

    taken: GPUs before these that other processes of the host take, unless this one sees no more than its `own`.
    """
    seen = [name for name in os.environ.get(GPUS, "").split(",") if name]
    at = index if seen and len(seen) <= own else index + taken
    return {GPUS: seen[at] if at < len(seen) else "" if seen else str(at)}


def path_list(name: str) -> list[str]:
    """The entries of a colon-separated variable such as PYTHONPATH."""
    return [entry for entry in os.environ.get(name, "").split(os.pathsep) if entry]


def _default_python() -> Path:
    own = Path(sys.executable) if sys.executable else None
    if own is not None and own.name.startswith("python"):
        return own
    return Path(sys.prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
