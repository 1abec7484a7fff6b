"""How many bytes of a text one token can stand for: what can only be too long is refused without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

_SPACE_MARK = "\u2581"
_KEEPS = frozenset({"ByteLevel", "Digits", "Punctuation", "Split"})  # pre-tokenizers that cut and drop nothing
# Bytes of a text whose canonical composition (NFC) takes one: 7 become 2 at the most, as U+1FBE U+0308 U+0301 do.
_COMPOSED = 4


def bytes_a_token(backend: tokenizers.Tokenizer, sentencepiece: bool) -> int | None:
    """The most bytes of a text that one token can stand for; None where parts of a text may be dropped, put together
    or written otherwise without a bound, so that a long text may have few tokens.

    sentencepiece: tokens hold U+2581 for a space and `<0xE4>` for a byte; else they are in byte-level's alphabet.
    """
    model = backend.model
    if not isinstance(model, models.BPE):
        return None
    lone_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = lone_bytes if sentencepiece else pre_tokenizers.ByteLevel.alphabet()
    if any(backend.token_to_id(one) is None for one in alphabet) or (sentencepiece and not model.byte_fallback):
        return None  # what has no token is dropped, or is one unknown token
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # it takes all of the spaces beside it
    cuts = _steps(backend.pre_tokenizer, "pretokenizers")
    kinds = {step["type"] for step in cuts}
    if not kinds <= _KEEPS or any(step.get("behavior") == "Removed" for step in cuts):
        return None
    if not sentencepiece and "ByteLevel" not in kinds:
        return None
    grown = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            grown = _COMPOSED
        elif step["type"] != "Prepend" and not _writes_mark(step):
            return None
    # A character of byte-level's alphabet stands for a byte; added tokens are written as they are.
    added = [len(token.content.encode()) for token in backend.get_added_tokens_decoder().values()]
    plain = [len(token.encode()) if sentencepiece else len(token) for token in backend.get_vocab(False)]
    return grown * max([*added, *plain])


def _writes_mark(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == _SPACE_MARK


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer. name: of those of a sequence."""
    return [] if part is None else _flat(json.loads(part.__getstate__()), name)


def _flat(step: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for inner in step[name] for one in _flat(inner, name)] if step["type"] == "Sequence" else [step]
