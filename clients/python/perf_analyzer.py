"""`nereid perf-analyzer`: NVIDIA's perf_analyzer out of the tritonclient 2.50.0 wheel, with its libraries found.

It wants two libraries of the system (Debian's libb64-0d, CUDA's runtime). The nvidia-pytriton wheel has both.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import sys
import zlib
from pathlib import Path

_LIBRARIES = {"libb64.so.0d": "libb64-*.so*", "libcudart.so.12": "libcudart-*.so.12*"}


class NoPerfAnalyzer(Exception):
    """There is no binary to run; the message says what to do."""


def binary() -> str:
    """Path of perf_analyzer: next to this Python, else on PATH. Raises NoPerfAnalyzer."""
    own = Path(sys.executable).parent / "perf_analyzer"
    found = str(own) if own.is_file() else shutil.which("perf_analyzer")
    if found is None:
        raise NoPerfAnalyzer("there is no perf_analyzer; it comes with: pip install tritonclient==2.50.0")
    return found


def lend_libraries(folder: Path) -> None:
    """Link into `folder` what perf_analyzer wants from the system, out of nvidia-pytriton."""
    try:
        files = importlib.metadata.files("nvidia-pytriton") or []
    except importlib.metadata.PackageNotFoundError:
        return  # inside NVIDIA's SDK container the system has them
    for name, pattern in _LIBRARIES.items():
        found = [file for file in files if file.match(pattern)]
        if found:
            target = Path(str(found[0].locate())).resolve()
            if (folder / name).resolve() != target:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(target)


def with_libraries(folder: Path) -> str:
    """LD_LIBRARY_PATH for the binary, with the libraries that stand in `folder`."""
    return f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")


def on_path(cache: Path) -> Path:
    """A folder below `cache` that goes into PATH: its `perf_analyzer` runs the binary with its libraries. genai-perf
    starts the program by that name. Raises NoPerfAnalyzer."""
    program = binary()
    folder = cache / f"perf-analyzer-{zlib.crc32(program.encode()):08x}"
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    lend_libraries(folder / "lib")
    script = folder / "perf_analyzer"
    own = shlex.quote(str(folder / "lib"))
    words = f'LD_LIBRARY_PATH={own}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec {shlex.quote(program)} "$@"'
    made = folder / f".perf_analyzer-{os.getpid()}"
    made.write_text(f"#!/bin/sh\n{words}\n")
    made.chmod(0o755)
    made.replace(script)
    return folder
