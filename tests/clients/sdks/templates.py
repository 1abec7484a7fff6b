"""Published chat templates out of llama-cpp-python's source: `python -m tests.clients.sdks.templates FOLDER`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
_INSIDE = "/vendor/llama.cpp/models/templates/"


def fetch(folder: Path) -> None:
    """Write each of the package's templates to a file of `folder`, by its own name."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as members:
            for member in members:
                held = members.extractfile(member) if _INSIDE in member.name and member.isfile() else None
                if held is not None and member.name.endswith(".jinja"):
                    (folder / Path(member.name).name).write_bytes(held.read())


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
