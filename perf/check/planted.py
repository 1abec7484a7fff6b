"""A failure of what ranks talk by, planted in a running engine from outside: the library's next sum fails, and on a GPU
the device does, as it would behind an error of NCCL."""

from __future__ import annotations

import os
from pathlib import Path

# Python runs it at the start of each process that finds it; those without ranks do nothing.
_PLANTED = """
import sys
import threading
import time
from pathlib import Path

MODULE = "engine.parallel.communicator"


def watch():
    while not hasattr(sys.modules.get(MODULE), "connect"):
        time.sleep(0.01)
    ranks = sys.modules[MODULE].GroupCommunicator
    begin, add_up, told = ranks.__init__, ranks.all_reduce, threading.Event()

    def begun(self, *given, **named):
        begin(self, *given, **named)
        threading.Thread(target=wait, args=(self,), daemon=True).start()

    def wait(group):
        file = Path(__file__).with_name(f"rank-{group.rank}")
        while True:
            if file.exists():
                file.unlink(missing_ok=True)
                told.set()
                if group.device.type == "cuda":
                    fail(group.device)
            time.sleep(0.01)

    def fail(device):
        import torch

        torch.ones(1, device=device)[torch.full((1,), 1 << 40, device=device)]

    def failing(self, x):
        if told.is_set():
            raise RuntimeError("NCCL error: unhandled system error (planted)")
        return add_up(self, x)

    ranks.__init__, ranks.all_reduce = begun, failing


if any(word in " ".join(sys.orig_argv) for word in ("engine.serving.host", "engine.parallel.worker")):
    threading.Thread(target=watch, daemon=True).start()
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables with which a server is started whose ranks look into `folder`."""
    (folder / "sitecustomize.py").write_text(_PLANTED)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def plant(folder: Path, rank: int) -> None:
    """Have that rank fail, once."""
    (folder / f"rank-{rank}").touch()
