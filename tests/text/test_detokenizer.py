from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import Detokenizer, Tokenizer
from tests.text.conftest import BUILT

TEXTS = st.lists(st.sampled_from([*"ab é€你好🙂👨\u200d👩 \n", "The ", " quick"]), max_size=40).map("".join)
KIND = st.sampled_from(["byte-level", "sentencepiece", "sentencepiece, no strip"])


def pieces(draw: st.DataObject, ids: list[int]) -> list[list[int]]:
    """`ids` cut anywhere, empty pushes included."""
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(text=TEXTS, kind=KIND, draw=st.data())
def test_deltas_make_up_the_text(text: str, kind: str, draw: st.DataObject) -> None:
    tokenizer = BUILT[kind]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push(piece).text for piece in pieces(draw, ids)]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) + detokenizer.finish().text == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 299), max_size=40), kind=KIND, skip=st.booleans(), draw=st.data())
def test_any_ids_give_the_same_text_in_pieces_and_whole(
    ids: list[int], kind: str, skip: bool, draw: st.DataObject
) -> None:
    tokenizer = BUILT[kind]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(piece).text for piece in pieces(draw, ids)) + detokenizer.finish().text
    assert text == tokenizer.decode(ids, skip)


@given(words=st.lists(st.sampled_from(["the", "quick", "fox", "brown", "dog", ".", "lazy"]), max_size=30))
def test_a_tokenizer_without_bytes_of_its_own_is_decoded_by_windows(words: list[str]) -> None:
    tokenizer = BUILT["wordpiece"]
    ids = tokenizer.encode(" ".join(words))
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push([i]).text for i in ids) + detokenizer.finish().text
    assert text == tokenizer.decode(ids)


@given(prompt=TEXTS, answer=TEXTS, kind=KIND)
def test_an_answer_continues_its_prompt(prompt: str, answer: str, kind: str) -> None:
    tokenizer = BUILT[kind]
    ids, cut = tokenizer.encode(prompt + answer), len(tokenizer.encode(prompt))
    if not tokenizer.decode(ids[:cut]) or "\ufffd" in tokenizer.decode(ids[:cut]):
        return
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    text = detokenizer.push(ids[cut:]).text + detokenizer.finish().text
    assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_a_character_cut_by_the_border_of_prompt_and_answer_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x\U0001fae0")
    detokenizer = Detokenizer(tokenizer, ids[:-2])
    assert [detokenizer.push([i]).text for i in ids[-2:]] == ["", "\U0001fae0"]


def test_a_character_never_completed_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x\U0001fae0")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]).text == "x"
    assert detokenizer.finish().text == "\ufffd"
    assert detokenizer.finish().text == ""


def test_ids_of_a_padded_vocabulary_add_nothing(any_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(any_tokenizer)
    assert detokenizer.push([any_tokenizer.vocab_size + 7]).text + detokenizer.finish().text == ""


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(where it starts, the stop string) of the stop string that ends first in `text`; the longest of several."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


STOPS = st.lists(st.text(st.sampled_from("abé你"), min_size=1, max_size=4), min_size=1, max_size=64)


@given(
    text=st.text(st.sampled_from("abé你 "), max_size=40), stops=STOPS, kind=KIND, include=st.booleans(), draw=st.data()
)
def test_a_stop_string_ends_the_text_where_find_finds_it(
    text: str, stops: list[str], kind: str, include: bool, draw: st.DataObject
) -> None:
    tokenizer = BUILT[kind]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop=include)
    shown, used, stop = "", 0, None
    for piece in pieces(draw, ids):
        delta = detokenizer.push(piece)
        shown, used, stop = shown + delta.text, used + delta.num_tokens, delta.stop or stop
    shown += detokenizer.finish().text
    expected = first_end(text, stops)
    if expected is None:
        assert (shown, used, stop) == (text, len(ids), None)
        return
    start, expected_stop = expected
    end = start + len(expected_stop)
    assert (shown, stop) == (text[: end if include else start], expected_stop)
    assert (
        len(tokenizer.decode(ids[:used]).rstrip("\ufffd"))
        >= end
        > len(tokenizer.decode(ids[: used - 1]).rstrip("\ufffd"))
    )


def test_only_what_may_become_a_stop_string_is_held_back(folder: object) -> None:
    tokenizer = BUILT["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop=["zzy", "zq"])
    shown = [detokenizer.push(tokenizer.encode(char)).text for char in "azzzxzz"]
    assert shown == ["a", "", "", "z", "zzx", "", ""]
    assert detokenizer.finish().text == "zz"


def test_the_token_that_completes_a_stop_string_is_the_last_one_counted() -> None:
    tokenizer = BUILT["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop=["z!"])
    delta = detokenizer.push([i for char in "xz!yy" for i in tokenizer.encode(char)])
    assert (delta.text, delta.num_tokens, delta.stop) == ("x", 3, "z!")
    assert detokenizer.push(tokenizer.encode("y")).num_tokens == 0


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, ""), (1, "z"), (2, "zz"), (4, "zzaz"), (5, "zzazz")])
def test_min_tokens_lets_early_stop_strings_pass(min_tokens: int, shown: str) -> None:
    tokenizer = BUILT["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop=["z"], min_tokens=min_tokens)
    text = "".join(detokenizer.push(tokenizer.encode(char)).text for char in "zzazz") + detokenizer.finish().text
    assert text == {2: "zza"}.get(min_tokens, shown)


def test_long_stop_strings_that_share_a_start_are_told_apart() -> None:
    tokenizer = BUILT["byte-level"]
    stops = ["a" * 4000 + chr(98 + n % 26) * (1 + n // 26) for n in range(64)]
    detokenizer = Detokenizer(tokenizer, stop=stops)
    ids = tokenizer.encode("a" * 5000 + "ccc")
    delta = detokenizer.push(ids)
    assert (len(delta.text), delta.stop) == (1000, stops[1])
