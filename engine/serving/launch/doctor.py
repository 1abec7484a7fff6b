"""What a machine has and lacks for serving."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from engine import env
from engine.parallel.host_group import listen
from engine.parallel.placement import PlacementError, placed
from engine.serving.launch import gpus, launcher
from kernels.tuned.tables import describe

_SHM_BYTES = 256 << 20
_CONNECT_S = 5.0


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. needed: nothing is served without it. remedy: what to do when it is not ok."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def examine() -> list[Finding]:
    """Look at everything; nothing is changed but the assembled server in the cache folder."""
    return [found for look in (_python, _packages, _server, _shared_memory, _gpu, _gpus, _hosts) for found in look()]


def _python() -> Iterator[Finding]:
    release = platform.python_version()
    ok = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding("Python 3.10 to 3.13", ok, release, "use one of those: the server has stubs for them")


def _packages() -> Iterator[Finding]:
    wanted: list[tuple[str, str, Callable[[str], bool]]] = [
        ("numpy", "pip install 'numpy>=1.26,<2'", lambda v: int(v.split(".")[0]) < 2),
        ("msgspec", "pip install msgspec", lambda v: True),
        ("tokenizers", "pip install tokenizers", lambda v: True),
        ("safetensors", "pip install safetensors", lambda v: True),
        ("torch", "pip install 'nereid[engine]'", lambda v: True),
        ("triton", "pip install 'nereid[engine]'", lambda v: True),
    ]
    for name, remedy, good in wanted:
        found = _version(name)
        yield Finding(name, found is not None and good(found), found or "not installed", remedy)
    hub = _version("huggingface_hub")
    yield Finding(
        "huggingface_hub, for a model from its name",
        hub is not None,
        hub or "not installed",
        "pip install 'nereid[hub]'",
        needed=False,
    )


def _server() -> Iterator[Finding]:
    try:
        server = launcher.find_server()
    except launcher.LaunchError as error:
        yield Finding("tritonserver", False, "none", str(error))
        return
    where = "the nvidia-pytriton wheel" if server.embedded else str(server.binary)
    yield Finding("tritonserver", True, where)
    try:
        done = subprocess.run(
            [str(server.binary), "--help"],
            env=launcher.environment(server),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        output = done.stdout + done.stderr
        ok = "--model-repository" in output
        lines = output.strip().splitlines() or [f"exit status {done.returncode}"]
        yield Finding("tritonserver runs", ok, "yes" if ok else lines[0], "it needs glibc 2.35 or later and x86-64")
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("tritonserver runs", False, str(error), "it needs glibc 2.35 or later and x86-64")


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    yield Finding(
        "shared memory in /dev/shm",
        free >= _SHM_BYTES,
        f"{free >> 20} MiB free",
        "start the container with --shm-size=1g",
    )
    run_dir = env.read().run_dir
    length = len(str(run_dir))
    yield Finding(f"sockets fit under {run_dir}", length <= 60, f"{length} characters", f"set {env.RUN_DIR} shorter")


def _gpu() -> Iterator[Finding]:
    found = "none: models run on the CPU"
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        found = done.stdout.strip().replace("\n", "; ") if done.returncode == 0 else found
    ok = not found.startswith("none")
    yield Finding("NVIDIA GPU", ok, found, "install the driver to serve on a GPU", needed=False)
    if ok and importlib.util.find_spec("torch") is not None:
        cuda = "+cpu" not in (_version("torch") or "")
        yield Finding(
            "torch with CUDA", cuda, _version("torch") or "", "pip install torch (a CUDA build)", needed=False
        )


def _gpus() -> Iterator[Finding]:
    here = gpus.present()
    if not here:
        return
    sizes = "; ".join(f"GPU{i} {gpu.memory / 1e9:.0f} GB" for i, gpu in enumerate(here))
    yield Finding("GPU memory", True, sizes, needed=False)
    yield from _tuned(sorted({gpu.name for gpu in here}))
    rooms = [n * gpus.room(min(gpu.memory for gpu in here)) / 1e9 for n in range(1, len(here) + 1)]
    fits = "; ".join(f"{n + 1}: {gb:.0f} GB" for n, gb in enumerate(rooms) if n in (0, 1, 3, 7, len(here) - 1))
    yield Finding("weights that fit beside a cache, by parallel.tensor", True, fits, needed=False)
    if len(here) > 1:
        found = gpus.links()
        slow = [pair for pair, kind in found.items() if not kind.startswith("NV")]
        said = "; ".join(f"GPU{one}-GPU{other} {kind}" for (one, other), kind in sorted(found.items()))
        remedy = "parallel.tensor over these is slow: give each model GPUs that NVLink joins"
        yield Finding("links between GPUs", bool(found) and not slow, said or "unknown", remedy, needed=False)


def _tuned(names: list[str]) -> Iterator[Finding]:
    """Which numbers kernels are launched with."""
    for name in names:
        yield Finding(f"tuned numbers of {name}", True, describe(name), needed=False)


def _hosts() -> Iterator[Finding]:
    """Where a launcher of several processes has started this one."""
    what = "hosts of one model (WORLD_SIZE)"
    try:
        placement = placed(env.read().launched)
        if placement.hosts == 1:
            return
        where = f"number {placement.host} of {placement.hosts}; the first at {placement.address}, port {placement.port}"
        if placement.host == 0:
            listen(placement, 0, patience_s=0.0).close()
    except PlacementError as error:
        yield Finding(what, False, "not usable", str(error))
        return
    yield Finding(what, True, where)
    if placement.host > 0:
        try:
            socket.create_connection((placement.address, placement.port), _CONNECT_S).close()
            found = "it listens"
        except OSError as error:
            found = error.strerror or str(error)
        remedy = "start `nereid serve` there, and see that this host reaches its port"
        yield Finding("the first host", found == "it listens", found, remedy, needed=False)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
