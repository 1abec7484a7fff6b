"""Getting an engine ready imports nothing that takes long and is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from tests.runner.tiny import make
make(Path(sys.argv[1]))
print([name for name in ("sympy", "torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""


def test_a_runner_is_built_without_torchs_compilers(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
