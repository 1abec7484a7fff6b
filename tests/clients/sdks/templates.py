"""Published chat templates: `python -m tests.clients.sdks.templates FOLDER [--vllm CHECKOUT]`.

Those of llama.cpp come with llama-cpp-python's source; those that vLLM has for forms of calls that no model's own
template writes come from its examples, which are cloned from GitHub without a checkout.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.peers.__main__ import copied

PACKAGE = "llama-cpp-python==0.3.36"
VLLM = "https://github.com/vllm-project/vllm"
_INSIDE = "/vendor/llama.cpp/models/templates/"


def fetch(folder: Path, vllm: str) -> None:
    """Write each template to a file of `folder`, by its own name. vllm: a checkout, or an address to clone."""
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
        for file in copied(vllm, Path(scratch) / "vllm", part="examples").glob(
            "examples/**/tool_chat_template_*.jinja"
        ):
            shutil.copy(file, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", default="", help="a checkout; cloned where it is empty")
    told = parser.parse_args()
    fetch(told.folder, told.vllm or VLLM)
