"""Kernels compiled where no GPU can run them, in a process of their own: this one's Triton may be the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHARED_BYTES = 232448  # a program may have of shared memory on Hopper


def environment(cache: Path) -> dict[str, str]:
    """Of a process whose Triton compiles, into `cache`."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(program: str, folder: Path) -> str:
    """What a Python program prints that runs in a process of its own."""
    script = folder / "program.py"  # Triton reads the source of what it compiles
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def box(*shape: int, fp8: bool = False) -> str:
    """The type of a descriptor that reads boxes of bfloat16, or of 8-bit floats."""
    from triton.experimental.gluon import language as gl

    kind = gl.float8e4nv if fp8 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), kind)
    return f"tensordesc<{kind.name.replace('float8', 'fp8') if fp8 else 'bf16'}{list(shape)},{layout!r}>"


def for_hopper(
    kernel: Any, constants: dict[str, Any], kind: Callable[[str], str], aligned: Sequence[str] = (), **options: int
) -> Any:
    """A Gluon kernel compiled; `kind` names the type of an argument that is no constant, `aligned` those that are
    multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})


@contextmanager
def launching() -> Iterator[tuple[Any, list[Any]]]:
    """A workspace on the CPU whose launches, which may depend on the one before, are compiled for Hopper and not run;
    behind it, all kernels that were compiled. Sets the driver of this process."""
    import torch
    import triton

    from kernels.compilation.ahead import Compiler
    from kernels.workspace import Workspace
    from tests.kernels.compilation.driver import Driver

    triton.runtime.driver.set_active(Driver())
    workspace = Workspace(torch.device("cpu"))
    workspace.pdl = True
    kernels: list[Any] = []
    with Compiler(1, None) as compiler:
        with compiler.only(workspace):
            yield workspace, kernels
        made = compiler._made.values()
        kernels += [kernel.result() if hasattr(kernel, "result") else kernel for kernel in made]
