"""Getting an engine ready imports nothing that takes long and is not used, and takes no more threads than help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from engine.config import RuntimeConfig
from tests.runner.tiny import make
make(Path(sys.argv[1]), runtime=RuntimeConfig(device="cpu"))
import torch
print(torch.get_num_threads())
print([name for name in ("sympy", "torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize(("wanted", "taken"), [(None, "1"), ("2", "2")])
def test_a_runner_takes_one_thread_unless_told_otherwise_and_none_of_torchs_compilers(
    tmp_path: Path, wanted: str | None, taken: str
) -> None:
    """A small model on a CPU."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    told = kept if wanted is None else {**kept, "OMP_NUM_THREADS": wanted}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True, env=told
    )
    assert done.stdout.splitlines() == [taken, "[]"]
