"""Where and from what a figure comes: every result that a tool of this folder writes carries it."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@functools.cache
def provenance() -> dict[str, str]:
    """Commit, command, date, machine and versions, as they were at the first call.

    NEREID_COMMIT names the commit of a copy that is no checkout of it. Versions are those of the packages that are
    installed; torch is not imported, so that a load's client stays small.
    """
    named = {name: _version(name) for name in ("torch", "triton")}
    gpu = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]
    return {
        "commit": os.environ.get("NEREID_COMMIT") or _commit(),
        "command": " ".join(["python", *_program(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **({"gpu": gpu} if gpu else {"cpu": processor()}),
        "python": platform.python_version(),
        **{name: found for name, found in named.items() if found},
    }


def processor() -> str:
    """The cores of this machine and what they are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return f"{os.cpu_count()} cores ({models[0] if models else platform.machine()})"


def _commit() -> str:
    changes = "+changes" if _said("git", "status", "--porcelain", "--untracked-files=no") else ""
    return (_said("git", "rev-parse", "HEAD") or "unknown") + changes


def _program() -> list[str]:
    """What Python was asked to run: a module, or a file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [Path(sys.argv[0]).name] if spec is None else ["-m", spec.name]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _said(*command: str) -> str:
    """What a program prints; nothing when it fails or is not there."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
