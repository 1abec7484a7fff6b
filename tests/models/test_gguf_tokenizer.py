"""Tokenizers made of GGUF metadata cut texts as transformers' do, or as the definition of their kind says."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from engine.demo.make import CHAT_TEMPLATE, SPECIAL, learn_merges, vocabulary
from engine.demo.passage import PASSAGE
from engine.models.gguf import tokenizer as ours
from engine.types import RequestError

MERGES = learn_merges(PASSAGE, 120)
VOCABULARY = vocabulary(MERGES)
TEXTS = (
    "How do I open a file? I'LL say: don't!\n\n\n  12345 + 6.7e-8\t(x == y) // z\r\n ",
    "Straße, naïveté, Ελληνικά, русский ԱՖ ა 你好\uff0c世界。こんにちは 안녕 ½ Ⅷ ٣٤٥ 👩‍👩‍👧 a\u0301 _x-y_ #tag @me",
    "   leading and trailing   \n",
    "",
)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(TEXTS)


def bpe(pre: str, **own: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(VOCABULARY),
        "tokenizer.ggml.token_type": tuple(3 if token in SPECIAL else 1 for token in VOCABULARY),
        "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in MERGES),
        "tokenizer.ggml.bos_token_id": VOCABULARY[SPECIAL[1]],
        "tokenizer.ggml.eos_token_id": VOCABULARY[SPECIAL[2]],
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **{key if "." in key else f"tokenizer.ggml.{key}": value for key, value in own.items()},
    }


def made(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(ours.tokenizer_files(metadata)["tokenizer.json"]))


CUTS = {pre: made(bpe(pre)).pre_tokenizer for pre in ours.PRE}
WHOLE = made(bpe("qwen2"))


def pieces(pre: Any, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in pre.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(set(ours.PRE) & set(theirs.GGUF_PRE_TOKENIZER_SPLITS)))
@given(text=anything)
@settings(max_examples=60, deadline=None)
def test_words_are_those_of_transformers(name: str, text: str) -> None:
    split = pre_tokenizers.Split(Regex(theirs.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    assert pieces(CUTS[name], text) == pieces(split, text)


@pytest.mark.parametrize("name", ["deepseek-coder", "deepseek-llm", "deepseek-v3"])
@given(text=anything)
@settings(max_examples=60, deadline=None)
def test_patterns_cut_what_those_before_left(name: str, text: str) -> None:
    # What Unicode has not given out yet is a letter in one library and nothing in the other.
    text = "".join(c for c in text if unicodedata.category(c) != "Cn")
    parts = [text] if text else []
    for pattern in ours.PRE[name].patterns:
        parts = [piece for part in parts for piece in regex.split(f"({pattern})", part) if piece]
    assert pieces(CUTS[name], text) == parts


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("deepseek-v3", "ab12345 你好x\n", ["ab", "123", "45", " ", "你好", "x", "\n"]),
        ("deepseek-v3", "f(_name) -> x", ["f", "(_", "name", ")", " ->", " x"]),
        ("deepseek-llm", "ab 12345 cd你好!\n", ["ab", " ", "12345", " cd", "你好", "!", "\n"]),
        ("deepseek-coder", "ab 12 cd你好! +x\n", ["ab", " ", "1", "2", " cd", "你好", "!", " +", "x", "\n"]),
        ("llama-bpe", "ab12345 don't", ["ab", "123", "45", " don", "'t"]),
        ("smaug-bpe", "ab12345 don't", ["ab", "123", "45", " don", "'t"]),
        ("qwen2", "ab12 x", ["ab", "1", "2", " x"]),
        ("smollm", "ab12 x", ["ab", "1", "2", " x"]),
        ("gpt-2", "ab12 don't  x", ["ab", "12", " don", "'t", " ", " x"]),
    ],
)
def test_words_of_each_kind(name: str, text: str, wanted: list[str]) -> None:
    assert pieces(CUTS[name], text) == wanted


@given(text=anything)
@settings(max_examples=60, deadline=None)
def test_bytes_come_back(text: str) -> None:
    ids = WHOLE.encode(text).ids
    assert WHOLE.decode(ids, skip_special_tokens=False) == WHOLE.normalizer.normalize_str(text)


def test_special_tokens_stand_alone_and_end_a_turn() -> None:
    ids = WHOLE.encode("<|im_start|>user<|im_end|>").ids
    assert (ids[0], ids[-1]) == (VOCABULARY["<|im_start|>"], VOCABULARY["<|im_end|>"])
    assert ours.end_ids(bpe("qwen2")) == [VOCABULARY["<|im_end|>"], VOCABULARY["<|endoftext|>"]]
    more = bpe("qwen2", eos_token_ids=(VOCABULARY["a"], VOCABULARY["<|im_end|>"]), add_padding_token=False)
    assert ours.end_ids(more) == [VOCABULARY["<|im_end|>"], VOCABULARY["a"], VOCABULARY["<|endoftext|>"]]
    begun = made(bpe("llama-bpe"))
    assert begun.encode("a").ids[0] == VOCABULARY["<|im_start|>"], "texts of this kind begin so unless the file says"
    both = made(bpe("qwen2", add_bos_token=True, add_eos_token=True)).encode("a").ids
    assert (both[0], both[-1]) == (VOCABULARY["<|im_start|>"], VOCABULARY["<|im_end|>"])
    said = ours.tokenizer_files(bpe("qwen2"))["tokenizer_config.json"]
    assert said == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}


# Scores of a small sentencepiece vocabulary: letters, and words of them, the best first.
WORDS = ("▁t", "he", "▁the", "▁a", "in", "ab", "bab", "ba", "abab", "▁▁", "th", "the", "an", "▁an", "aa", "aaa")
LETTERS = tuple("▁abcdehintxyz")
PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *LETTERS)
SCORES = (*[0.0] * 259, *(-float(i) for i in range(len(WORDS))), *(-100.0 - i for i in range(len(LETTERS))))


def sentencepiece(**own: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": (2, 3, 3, *[6] * 256, *[1] * (len(WORDS) + len(LETTERS))),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in own.items()},
    }


def defined(text: str, prefix: bool) -> list[int]:
    """Sentencepiece's BPE: of all neighbours that are a piece together, those of the best score become one, the
    leftmost first (Kudo and Richardson 2018, arXiv:1808.06226); what is no piece is spelled in bytes."""
    ids, scores = {piece: i for i, piece in enumerate(PIECES)}, dict(zip(PIECES, SCORES, strict=True))
    parts = list((" " if prefix and text else "").replace(" ", "▁") + text.replace(" ", "▁"))
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[part] if part in ids else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [ids[piece] for pieces in spelled for piece in pieces]


SPM = {prefix: made(sentencepiece(add_space_prefix=prefix, add_bos_token=False)) for prefix in (True, False)}


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text("abtheinxé ", max_size=30))
@settings(max_examples=150, deadline=None)
def test_pieces_join_by_score(prefix: bool, text: str) -> None:
    ids = SPM[prefix].encode(text).ids
    assert ids == defined(text, prefix)
    assert SPM[prefix].decode(ids) == text


def test_texts_of_sentencepiece_begin_with_a_token() -> None:
    assert made(sentencepiece()).encode("the").ids[0] == 1


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (bpe("unheard"), "tokenizer.ggml.pre is unheard"),
        (bpe("qwen2", model="t5"), "tokenizer.ggml.model is t5; gpt2 and llama"),
        (bpe("qwen2", merges=("a b c",)), "merges must be an array of two tokens each"),
        (bpe("qwen2", merges=("a zzzz",)), "names tokens that are not in"),
        (bpe("qwen2", token_type=(1,)), "as many items"),
        (bpe("qwen2", eos_token_id=100_000), "eos_token_id = 100000 is no token"),
        (bpe("qwen2", add_padding_token=True), "add_padding_token = True is not implemented"),
        (bpe("qwen2", remove_extra_whitespaces=True), "remove_extra_whitespaces = True is not implemented"),
        (bpe("qwen2", tokens=("a", "a"), token_type=(1, 1)), "names a token twice"),
        (sentencepiece(scores=(0.0,)), "a score for each token"),
    ],
)
def test_what_is_not_implemented_is_named(metadata: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=re.escape(why)):
        ours.tokenizer_files(metadata)
