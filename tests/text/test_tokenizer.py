from __future__ import annotations

import resource
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from engine.text import Tokenizer, least_tokens
from engine.types import ErrorCode, RequestError
from tests.text.conftest import BUILT, KINDS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXTS, name=st.sampled_from(["byte-level", "sentencepiece"]))
def test_decode_returns_the_encoded_text(text: str, name: str) -> None:
    tokenizer = BUILT[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(0, 299), max_size=30))
def test_byte_level_decode_equals_the_library_on_any_ids(ids: list[int]) -> None:
    assert BUILT["byte-level"].decode(ids, skip_special_tokens=False) == KINDS_BUILT.decode(
        ids, skip_special_tokens=False
    )


KINDS_BUILT = KINDS["byte-level"]()


def test_special_tokens_are_skipped_or_shown(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_a_saved_truncation_does_not_cut_prompts(folder: Path) -> None:
    backend = KINDS["byte-level"]()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_folder(folder).encode("z" * 10)) == 10


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"ab\xff", "byte 0xff at position 2"), ("ab\ud800", r"U\+D800 at position 2"), (b"\xe4\xbd", "not valid UTF-8")],
)
def test_text_that_is_not_unicode_is_refused(any_tokenizer: Tokenizer, text: str | bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        any_tokenizer.encode(text)


def test_ids_out_of_the_vocabulary_are_refused(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="token_ids holds the token id"):
        any_tokenizer.decode([any_tokenizer.vocab_size])
    with pytest.raises(RequestError, match="token id -1"):
        any_tokenizer.decode([-1])


def test_a_folder_without_a_tokenizer_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(RequestError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_a_broken_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "Oracle"}}')
    with pytest.raises(RequestError, match="not a tokenizer that the tokenizers library can read"):
        Tokenizer.from_folder(folder)


def test_token_text_shows_parts_of_a_character(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert {tokenizer.token_text(i) for i in tokenizer.encode("\U0001fae0")} == {"\ufffd"}
    assert tokenizer.token_text(tokenizer.encode(" ")[0]) == " "


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_of_large_texts_goes_back_and_one_is_encoded_at_a_time(folder: Path) -> None:
    """A text of 6 MB took 1 GB, which stayed with the allocator, and eight at once eight of them."""
    tokenizer = Tokenizer.from_folder(folder)
    before, text = resident(), "a b " * 400_000
    highest: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            highest.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda _: len(tokenizer.encode(text)), range(4)))
    ended.set()
    watcher.join()
    assert len(set(ids)) == 1
    assert resident() - before < 100 << 20
    alone = max(highest) - before
    assert alone < 2 * len(text) * 200, "as much as two texts take"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def composing() -> tokenizers.Tokenizer:
    backend = KINDS["byte-level"]()
    backend.normalizer = normalizers.NFC()
    return backend


BOUNDED = {name: BUILT[name] for name in ("byte-level", "sentencepiece", "sentencepiece, no strip")}
BOUNDED["composing"] = Tokenizer(composing())
DENSE = ["\u212a" * 40, "\u1fbe\u0308\u0301" * 40, "\u2581" * 40, "<|end|>" * 20, "the the" * 20, " " * 200]


@given(text=st.one_of(TEXTS, st.sampled_from(DENSE)), name=st.sampled_from(sorted(BOUNDED)))
def test_no_text_has_fewer_tokens_than_its_bytes_say(text: str, name: str) -> None:
    tokenizer = BOUNDED[name]
    least = tokenizer.least_tokens(len(text.encode()))
    assert least <= len(tokenizer.encode(text, add_special_tokens=False))
    assert least or not text


def test_composition_makes_no_more_of_a_text_vanish_than_is_counted() -> None:
    """Over all characters: the most bytes whose canonical composition is one character, over that one's bytes."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    # Any other stands for itself, in as many bytes as it has.
    apart = {char: unicodedata.normalize("NFD", char) for char in every if not unicodedata.is_normalized("NFD", char)}
    longest = {char: len(char.encode()) for char in set("".join(apart.values()))}
    for char, parts in apart.items():
        if len(parts) == 1:
            longest[parts] = max(longest[parts], len(char.encode()))
    written = {**longest, **{char: sum(longest[part] for part in parts) for char, parts in apart.items()}}
    assert all(len(char.encode()) <= most for char, most in written.items())
    most = max(written[c] / len(c.encode()) for c in written if unicodedata.normalize("NFC", c) == c)
    assert most <= least_tokens._COMPOSED


def _change(change: Callable[[tokenizers.Tokenizer], object]) -> Tokenizer:
    backend = KINDS["byte-level"]()
    change(backend)
    return Tokenizer(backend)


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.NFKC()),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace("a", "")),
        lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
        ),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda backend: backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)]),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: Callable[[tokenizers.Tokenizer], object]) -> None:
    assert _change(change).least_tokens(1 << 30) == 0
    assert BUILT["wordpiece"].least_tokens(1 << 30) == 0
