"""What the first rank tells the others, in order. All of it is plain numbers."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from engine.core.plan import StepPlan


class Launch(msgspec.Struct, frozen=True, tag="launch", array_like=True):
    """Execute a step."""

    plan: StepPlan


class Draw(msgspec.Struct, frozen=True, tag="draw", array_like=True):
    """Draw the masked entries of the step that was launched as `step`: masks [entries, words] int32, as bytes."""

    step: int
    words: int
    masks: bytes


class Idle(msgspec.Struct, frozen=True, tag="idle", array_like=True):
    """Do a piece of work that was put off."""


class Close(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """End."""


Command = Launch | Draw | Idle | Close


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} does not travel between ranks")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode = msgspec.msgpack.Decoder(Command).decode
