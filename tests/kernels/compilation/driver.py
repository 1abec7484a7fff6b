"""Compiles a few kernels ahead on a machine without a GPU, and says where they were compiled.

    python -m tests.kernels.compilation.driver none | helper | child-killed | helper-killed | abandoned

The driver is a stand-in: kernels are compiled for Hopper as they would be, and nothing is loaded or run. Prints JSON.
`abandoned` prints the helper's pid and waits, with compilations under way, for whoever ends it. TRITON_CACHE_DIR names
the cache. It must have a process of its own, whose Triton is not the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels.compilation.process import CompileProcess

OPS = ("rms_norm", "gated_activation", "linear", "sample")
GONE_S = 20.0


class Driver:
    """What Triton asks of a device's driver until a kernel is launched."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=lambda *_: (1, 1, 32, 0, 1024)
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> None:
        return None


def children(helper: int) -> list[int]:
    """Children that compile; the helper runs programs as well."""
    with contextlib.suppress(OSError):
        own = Path(f"/proc/{helper}/cmdline").read_bytes()
        found = Path(f"/proc/{helper}/task/{helper}/children").read_text().split()
        time.sleep(0.01)  # a program has taken its own name by then
        return [int(child) for child in found if Path(f"/proc/{child}/cmdline").read_bytes() == own]
    return []


def running(pid: int) -> bool:
    """Whether it is there and no zombie: nobody may be left to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outlive(pids: Iterable[int]) -> list[int]:
    """Those that still run when GONE_S have passed; the system takes its time to end a process that was killed."""
    until = time.monotonic() + GONE_S
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def kill_first_child(helper: int, and_the_helper: bool) -> None:
    """Once the helper compiles."""
    while not (found := children(helper)):
        time.sleep(0.002)
    os.kill(helper if and_the_helper else found[0], signal.SIGKILL)


def launch_all(workspace: Any) -> None:
    """Kernels of several ops, and of both of Triton's languages."""
    import torch

    from kernels.registry import registry

    for op in registry():
        cases = op.cases() if op.name in OPS else []
        for case in [case for case in cases if case.small and case.dtype == torch.bfloat16][:6]:
            op.bound(workspace)(**case.make(torch.device("cpu"), torch.Generator()))


def main() -> None:
    scenario = sys.argv[1]
    process = None if scenario == "none" else CompileProcess(dict(os.environ))
    import torch
    import triton

    import kernels.hardware
    from kernels.compilation.ahead import Compiler
    from kernels.workspace import Workspace

    triton.runtime.driver.set_active(Driver())
    kernels.hardware.multiprocessors = lambda device: 132  # type: ignore[assignment]
    kernels.hardware.dependent_launch = lambda device: True  # type: ignore[assignment]
    kernels.hardware.bulk_copies = lambda device: True  # type: ignore[assignment]
    kernels.hardware.group_products = lambda device: True  # type: ignore[assignment]
    workspace = Workspace(torch.device("cpu"))
    heard: list[tuple[str, bool]] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: heard.append((src.name, cache_hit))
    seen: set[int] = set()
    if process is not None and scenario.endswith("killed"):
        killing = (process.pid, scenario == "helper-killed")
        threading.Thread(target=kill_first_child, args=killing, daemon=True).start()
    answers: list[bool] = []

    def elsewhere(variant: bytes) -> bool:
        assert process is not None
        answers.append(process.compile(variant))
        return answers[-1]

    with Compiler(4, None if process is None else elsewhere) as compiler, compiler.only(workspace):
        launch_all(workspace)
        if process is not None:
            while scenario == "abandoned" and not children(process.pid):
                time.sleep(0.002)
            seen.update(children(process.pid))
            if scenario == "abandoned":
                print(json.dumps([process.pid, *seen]), flush=True)
                time.sleep(600)
    if process is not None:
        process.close()
        seen.add(process.pid)
    print(
        json.dumps(
            {
                "kernels": sorted(name for name, _ in heard),
                "here": [name for name, cached in heard if not cached],
                "failed": answers.count(False),
                "left": outlive(seen),
            }
        )
    )


if __name__ == "__main__":
    main()
