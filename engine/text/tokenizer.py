"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from engine import heap
from engine.text.checkpoint_files import checkpoint_folder
from engine.text.least_tokens import bytes_a_token
from engine.text.token_bytes import byte_decoder, byte_level, decode_bytes
from engine.types import ErrorCode, RequestError

# The library takes 160 bytes of memory for each byte of a text.
LARGE_TEXT = 1 << 20


class Tokenizer:
    """A checkpoint's tokenizer. Safe to share between threads. One text of megabytes is encoded at a time.

    special_ids: ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}
        self._large = threading.Lock()

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face checkpoint folder. Raises RequestError with what is missing or broken."""
        folder = checkpoint_folder(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise RequestError(
                f"{folder} holds no tokenizer.json, so its text cannot be tokenized. Write one with "
                f"transformers' AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r}), "
                "or send input_ids instead of text_input",
                ErrorCode.NOT_FOUND,
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise RequestError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from error
        return cls(backend)

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises RequestError when it is not valid Unicode text."""
        if len(text) <= LARGE_TEXT:
            return self._encode(text, add_special_tokens)
        with self._large:
            ids = self._encode(text, add_special_tokens)
            heap.trim_malloc()
        return ids

    def _encode(self, text: str | bytes, add_special_tokens: bool) -> list[int]:
        # As a batch of one: that call gives the interpreter lock back, so a long prompt does not hold up other threads.
        (encoding,) = self._backend.encode_batch_fast([checked_text(text)], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def least_tokens(self, num_bytes: int) -> int:
        """A number of tokens that no text of so many bytes has less of; 0 where this tokenizer has no such bound."""
        longest = self._bytes_a_token
        return 0 if longest is None else -(-num_bytes // longest)

    def check_length(self, num_bytes: int, context: int) -> None:
        """Refuse a prompt that can only be too long before it is tokenized, which takes seconds for megabytes.

        context: tokens of a prompt and its answer; 0 while it is not known. Raises RequestError.
        """
        if not context or num_bytes <= LARGE_TEXT:
            return
        least = self.least_tokens(num_bytes)
        if least >= context:
            raise RequestError(
                f"the prompt of {num_bytes} bytes has {least} tokens or more, but at most {context - 1} can be served"
            )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` as a whole text of its own. Raises RequestError on an id out of the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise RequestError(f"token_ids holds the token id {i}; ids go from 0 to {self.vocab_size - 1}")
        if self._byte_decoder is None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        data = b"".join([self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids)])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return decode_bytes(data)

    def token_text(self, token_id: int) -> str:
        """One token for people to read (log-probabilities): its text, with U+FFFD for parts of a character."""
        if self._byte_decoder is not None:
            return decode_bytes(self.token_bytes(token_id))
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes (perhaps a part of a character) that one token adds to a text.

        Only for tokenizers whose `byte_exact` is true. An id without a token (a padded vocabulary) adds nothing.
        """
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            assert self._byte_decoder is not None, "this tokenizer's tokens have no bytes of their own"
            known = b"" if token is None else self._byte_decoder(token)
            self._bytes[token_id] = known
        return known

    def decode_window(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The library's own decode, for tokenizers that are not `byte_exact`."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    @property
    def byte_exact(self) -> bool:
        """True when a text is its tokens' bytes put together, which lets it be decoded in pieces at no cost."""
        return self._byte_decoder is not None

    @property
    def strips_leading_space(self) -> bool:
        """True when a text loses the one space at its very start (sentencepiece's dummy prefix)."""
        return self._decoder_kind[1]

    @property
    def _byte_decoder(self) -> Callable[[str], bytes] | None:
        return self._decoder_kind[0]

    @cached_property
    def _bytes_a_token(self) -> int | None:
        return bytes_a_token(self._backend, self._byte_decoder is not byte_level) if self.byte_exact else None

    @cached_property
    def _decoder_kind(self) -> tuple[Callable[[str], bytes] | None, bool]:
        return byte_decoder(self._backend)


def checked_text(text: str | bytes) -> str:
    """`text` as a str that can be encoded in UTF-8. Raises RequestError with the place of the fault."""
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"text_input is not valid UTF-8: byte 0x{text[error.start]:02x} at position {error.start} "
                f"({error.reason}); send UTF-8 encoded text"
            ) from None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text_input holds a lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, "
            "which is not a character; send valid Unicode text"
        ) from None
    return text
