"""Another rank's loop: executes what the first rank tells it, and says nothing back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.core.plan import MaskedPending, Runner
from engine.parallel import commands
from engine.parallel.commands import Close, Draw, Idle, Launch


def follow(runner: Runner, messages: Iterable[bytes]) -> None:
    """Run until `Close`, or until messages end. What a step gives is every rank's, so nobody asks for it here."""
    masked: dict[int, MaskedPending] = {}
    for message in messages:
        command = commands.decode(message)
        if isinstance(command, Launch):
            pending = runner.launch(command.plan)
            if command.plan.masked:
                masked[command.plan.step] = pending  # type: ignore[assignment]
        elif isinstance(command, Draw):
            bits = np.frombuffer(command.masks, np.int32).reshape(-1, command.words)
            step = masked.pop(command.step)
            step.mask_rows(*bits.shape)[:] = bits
            step.draw()
        elif isinstance(command, Idle):
            runner.idle()
        else:
            assert isinstance(command, Close)
            return
