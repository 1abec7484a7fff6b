"""Tokenizers of the kinds that checkpoints have, trained on a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.text import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus München: naïve café, 12,5 €!",
    "你好、世界。日本語のテキスト。",
    "def f(x):\n    return x + 1\n",
    "emoji 🙂🙃 and a family 👨‍👩‍👧‍👦",
] * 4


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    return backend


def sentencepiece(strip: bool = True) -> tokenizers.Tokenizer:
    lone_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({char for line in LINES for char in line if char.isascii() and char not in " \n"})
    tokens = ["<unk>", "<s>", "</s>", *lone_bytes, "\u2581", *letters, "\u2581T", "\u2581q", "he", "\u2581the"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("\u2581", "T"), ("\u2581", "q"), ("h", "e"), ("\u2581t", "he")]
    vocab["\u2581t"] = len(vocab)
    merges.insert(0, ("\u2581", "t"))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    marks = [normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *marks] if strip else marks)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece, no strip": lambda: sentencepiece(strip=False),
    "wordpiece": wordpiece,
}
BUILT = {name: Tokenizer(make()) for name, make in KINDS.items()}


@pytest.fixture(params=[name for name in KINDS if name != "wordpiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every kind whose encode loses nothing."""
    return BUILT[request.param]


@pytest.fixture(params=list(KINDS))
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return BUILT[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a byte-level tokenizer and nothing else."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
