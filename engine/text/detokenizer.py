"""Turn the tokens of one answer into text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer

_CHARACTER_BYTES = 4  # the longest UTF-8 character
_WINDOW_TOKENS = 6  # tokens a character may spread over before it is given up as broken


class Delta(msgspec.Struct, frozen=True):
    """What a push added. num_tokens: how many of the pushed tokens belong to the answer (fewer than pushed only when
    a stop string ended it: the token that completed the string is the last one). stop: the string that ended it."""

    text: str
    num_tokens: int
    stop: str | None = None


class _TextDecoder(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Incremental text of one answer: the texts of all deltas and of `finish` make up the whole answer.

    No part of a character is ever sent; a part that may belong to a stop string is held back until it is decided.
    A stop string found in the first `min_tokens` tokens does not end the answer. The stop string itself is left out
    of the text unless `include_stop`. The caller does not push a token that ended the answer by its id (end of
    sequence, `stop_token_ids`) when its text is not wanted.

    prompt_ids: what the answer continues; only the last few are read, for spaces and characters cut by the border.
    Cost is constant a token, whatever the length of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        decoder = _ByteText if tokenizer.byte_exact else _WindowText
        self._decoder: _TextDecoder = decoder(tokenizer, prompt_ids, skip_special_tokens)
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._ended = False

    def push(self, ids: Sequence[int]) -> Delta:
        """Take the next tokens of the answer."""
        if self._ended:
            return Delta("", 0)
        if self._stops is None:
            self._num_tokens += len(ids)
            return Delta(self._decoder.push(ids), len(ids))
        text = self._held
        for n, token_id in enumerate(ids, 1):
            self._num_tokens += 1
            new = self._decoder.push((token_id,))
            cut = self._find_stop(text, new)
            if cut is not None:
                self._ended, self._held = True, ""
                return Delta(cut[0], n, cut[1])
            text += new
        return Delta(self._release(text), len(ids))

    def finish(self) -> Delta:
        """The answer has no more tokens: the text that was held back, with U+FFFD for a character never completed
        (which may in turn complete a stop string)."""
        if self._ended:
            return Delta("", 0)
        self._ended = True
        text, new = self._held, self._decoder.finish()
        self._held = ""
        cut = self._find_stop(text, new) if self._stops is not None else None
        return Delta(text + new, 0) if cut is None else Delta(cut[0], 0, cut[1])

    def _find_stop(self, text: str, new: str) -> tuple[str, str] | None:
        """(text up to the stop string, the stop string) if `new`, which follows `text`, completes one."""
        assert self._stops is not None
        start = 0
        while (match := self._stops.feed(new[start:])) is not None:
            start += match[0]
            if self._num_tokens > self._min_tokens:
                whole = text + new[:start]
                return (whole if self._include_stop else whole[: len(whole) - len(match[1])]), match[1]
        return None

    def _release(self, text: str) -> str:
        assert self._stops is not None
        ready = len(text) - self._stops.held
        self._held = text[ready:]
        return text[:ready]


class _ByteText:
    """For byte-exact tokenizers: an incremental UTF-8 decoder over the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for i in reversed(prompt_ids):
            if i not in self._skipped:
                tail = self._token_bytes(i) + tail
            if len(tail) >= _CHARACTER_BYTES:
                break
        self._at_start = tokenizer.strips_leading_space and not tail
        self._utf8.decode(tail)

    def push(self, ids: Sequence[int]) -> str:
        token_bytes, skipped = self._token_bytes, self._skipped
        data = b"".join([token_bytes(i) for i in ids if i not in skipped])
        if self._at_start and data:
            self._at_start = False
            data = data[1:] if data.startswith(b" ") else data
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """For any other tokenizer: decode a short window of tokens with and without the new ones, and take the difference.

    The window's start follows the text that is out, so a step decodes a few tokens whatever the length of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decode = tokenizer.decode_window
        self._skip = skip_special_tokens
        self._window = list(prompt_ids[-_WINDOW_TOKENS:])
        self._num_out = len(self._window)  # tokens of the window whose text is out

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(i) for i in ids])

    def finish(self) -> str:
        return self._advance(self._decode(self._window, self._skip), _WINDOW_TOKENS)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window, self._skip)
        if text.endswith("\ufffd") and len(self._window) - self._num_out < _WINDOW_TOKENS:
            return ""
        return self._advance(text, _WINDOW_TOKENS)

    def _advance(self, text: str, keep: int) -> str:
        before = self._decode(self._window[: self._num_out], self._skip)
        delta = text[len(before) :]
        self._window = self._window[-keep:]
        self._num_out = len(self._window)
        return delta
