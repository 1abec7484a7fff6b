"""Ids of calls in a conversation, as a model's chat template writes them. The ids of answers are the shim's own, and
those of a conversation whoever's it was before."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from itertools import count
from typing import Any

Rename = Callable[[str, str], str]  # (id, name of the function) -> the id for the template

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def nine_letters() -> Rename:
    """Mistral's templates refuse any other id than nine letters and digits."""

    def renamed(call_id: str, name: str) -> str:
        if _NINE.fullmatch(call_id):
            return call_id
        number = int.from_bytes(hashlib.sha256(call_id.encode()).digest(), "big")
        return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(9))

    return renamed


def numbered_functions() -> Rename:
    """Kimi K2's write a call's id in place of its name: `functions.NAME:0`, counted through the conversation."""
    numbers = count()
    return lambda call_id, name: f"functions.{name}:{next(numbers)}"


def rename_calls(messages: list[dict[str, Any]], rename: Rename) -> None:
    """The ids of calls in `messages`, and those of the answers to them, through `rename`."""
    renamed: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            renamed[call["id"]] = call["id"] = rename(call["id"], call["function"]["name"])
        answered = message.get("tool_call_id")
        if answered is not None:
            message["tool_call_id"] = renamed.get(answered, answered)
