"""What ended a process, in words."""

from __future__ import annotations

import signal


def name(number: int) -> str:
    """Of a signal, as kill(1) has it. Those between SIGRTMIN and SIGRTMAX have none, and are told by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
