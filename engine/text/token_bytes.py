"""What bytes a token stands for, for the decoders whose texts are their tokens' bytes put together.

Two families cover almost every checkpoint: byte-level BPE, whose tokens are written in the 256 printable stand-ins
that GPT-2 introduced (Radford et al. 2019, released code `bytes_to_unicode`), and sentencepiece exports, whose tokens
hold U+2581 for a space and `<0xE4>` for a lone byte (Kudo and Richardson 2018, byte fallback).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers

ByteDecoder = Callable[[str], bytes]

_SPACE_MARK = "\u2581"


def byte_decoder(backend: tokenizers.Tokenizer) -> tuple[ByteDecoder | None, bool]:
    """(token string -> bytes, does the text lose one leading space), or (None, False) for any other decoder."""
    # Not backend.to_str(), which writes the whole vocabulary down: 0.2 s and 25 MB for 151,936 tokens.
    steps = [] if backend.decoder is None else _decoder_steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE_MARK:
        return _metaspace, steps[0].get("prepend_scheme", "always") != "never"
    core = ["Replace", "ByteFallback", "Fuse"]
    if kinds[:3] == core and _replaces_space_mark(steps[0]):
        if len(kinds) == 3:
            return _sentencepiece, False
        strip = steps[3]
        one_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if len(kinds) == 4 and strip == one_space:
            return _sentencepiece, True
    return None, False


def decode_bytes(data: bytes) -> str:
    """`data` as text; each maximal part that is not UTF-8 becomes one U+FFFD (Unicode 15, section 3.9)."""
    return data.decode("utf-8", errors="replace")


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _stand_ins() -> dict[str, int]:
    """Printable stand-in -> byte. Printable Latin-1 bytes stand for themselves, the others for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return table


_BYTE_OF_STAND_IN = _stand_ins()


def byte_level(token: str) -> bytes:
    """The bytes of a token that is written in the stand-ins."""
    try:
        return bytes([_BYTE_OF_STAND_IN[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode("utf-8")


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _metaspace(token)


def _metaspace(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode("utf-8")
