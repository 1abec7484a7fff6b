from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.openai.reasoning import TAGS, ReasoningSplitter

CASES = [
    ("think", "<think>\nabc\n\n</think>\n\nhi\n", "abc", "hi\n"),
    ("think", "<think>\n\n</think>\n\n\nanswer", "", "answer"),
    ("think", "plain <think>x</think>", "", "plain <think>x</think>"),
    ("think", "<think>cut off</thi", "cut off</thi", ""),
    ("think", " <thin", "", " <thin"),
    ("think-open", "abc\n</think>\nhi</think>", "abc", "hi</think>"),
    ("none", "\n<think>a</think>", "", "\n<think>a</think>"),
    ("mistral", "[THINK]abc[/THINK]hi", "abc", "hi"),
    ("mistral", "<think>x</think>", "", "<think>x</think>"),
    ("gemma4", "<|channel>thought\nabc\n<channel|>hi", "abc", "hi"),
    ("gemma4", "<|channel>thought\n<channel|>hi", "", "hi"),
    ("kimi", "◁think▷abc◁/think▷hi", "abc", "hi"),
]


def read(form: str, text: str, size: int) -> tuple[str, str]:
    name, _, opened = form.partition("-")
    splitter = ReasoningSplitter(TAGS.get(name), "inside" if opened else "before")
    parts = [splitter.feed(text[start : start + size]) for start in range(0, len(text), size)] + [splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(("form", "text", "reasoning", "content"), CASES)
def test_thinking_is_split_off_in_pieces_of_every_size(form: str, text: str, reasoning: str, content: str) -> None:
    for size in range(1, len(text) + 2):
        assert read(form, text, size) == (reasoning, content)


@given(
    text=st.text(alphabet="<think>/ a\n", max_size=50),
    size=st.integers(1, 50),
    form=st.sampled_from(["think", "think-open", "none"]),
)
def test_the_cut_changes_nothing(text: str, size: int, form: str) -> None:
    assert read(form, text, size) == read(form, text, len(text) + 1)
