"""Chat templates in processes of their own: whatever they do, there is a text or a sentence, and the next one works."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.serving.frontend import renderer
from engine.serving.frontend.renderer import Renderer
from engine.text import ChatTemplate
from engine.types import ErrorCode, RequestError
from tests.e2e.harness import wait_until

DOES_AS_IT_IS_TOLD = """
{%- for message in messages -%}
  {%- if message.content == "loop" -%}
    {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
  {%- elif message.content == "power" -%}{{- 9 ** (9 ** message.n) -}}
  {%- elif message.content == "grow" -%}{{- "0123456789" * message.n -}}
  {%- elif message.content == "list" -%}{{- [0] * message.n -}}
  {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
"""
Make = Callable[..., Renderer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("template")
    (made / "chat_template.jinja").write_text(DOES_AS_IT_IS_TOLD)
    return made


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[Renderer]:
    """With time enough for a busy machine."""
    made = Renderer(folder, most_s=30.0)
    yield made
    made.close()


@pytest.fixture
def hasty(folder: Path) -> Iterator[Renderer]:
    made = Renderer(folder, most_s=0.3, processes=2)
    yield made
    made.close()


def chat(content: str, **more: Any) -> bytes:
    return json.dumps([{"role": "user", "content": content, **more}]).encode()


def outcome(made: Renderer, messages: bytes, parameters: bytes | None = None) -> str | RequestError:
    try:
        return made.render(messages, parameters)
    except RequestError as error:
        return error


@contextmanager
def rendering_in_a_stopped_process(patient: Renderer) -> Iterator[tuple[Any, Future[Any]]]:
    """The one process that stands by, stopped, and what it was asked for meanwhile: the text "y"."""
    assert outcome(patient, chat("x")) == "x"
    (process,) = patient._idle
    os.kill(process._child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(outcome, patient, chat("y"))
        wait_until(lambda: not patient._idle, "it is being asked")
        yield process, rendering


@pytest.mark.parametrize("messages", [chat("loop"), chat("power", n=9)])
def test_what_takes_too_long_is_ended_with_a_sentence(hasty: Renderer, messages: bytes) -> None:
    """The power is one call into C, which no thread of the same process could end."""
    for _ in range(2):
        error = outcome(hasty, messages)
        assert isinstance(error, RequestError)
        assert error.message == "the chat template took more than 0.3 s for these messages"


def test_the_next_rendering_works(patient: Renderer) -> None:
    assert isinstance(outcome(patient, chat("list", n=10**9)), RequestError)
    assert outcome(patient, chat("hello")) == "hello"


def test_a_process_that_was_killed_is_replaced(patient: Renderer) -> None:
    assert outcome(patient, chat("hello")) == "hello"
    os.kill(patient._idle[-1]._child.pid, signal.SIGKILL)
    patient._idle[-1]._child.wait()
    assert outcome(patient, chat("hello")) == "hello"


def test_a_process_that_is_killed_meanwhile_costs_nothing(patient: Renderer) -> None:
    """The memory killer and operators do that; it was a 400, as if the messages had been wrong."""
    with rendering_in_a_stopped_process(patient) as (process, rendering):
        process._child.kill()
        assert rendering.result() == "y"


def test_a_process_that_has_had_nothing_to_do_ends(patient: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that a burst of chats started would stay for good, with 32 MB each."""
    monkeypatch.setattr(renderer, "_SPARE_S", 0.0)
    with rendering_in_a_stopped_process(patient) as (first, rendering):
        assert outcome(patient, chat("z")) == "z"
        (spare,) = patient._idle
        os.kill(first._child.pid, signal.SIGCONT)
        assert rendering.result() == "y"
    assert patient._idle == [first]
    assert spare.dead()


def test_while_all_processes_are_busy_the_others_are_told_so(hasty: Renderer) -> None:
    for _ in range(2):
        hasty._free.acquire()
    error = outcome(hasty, chat("hello"))
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("messages", [chat("grow", n=10**12), chat("list", n=10**10), chat("grow", n=9_000_000)])
def test_memory_and_the_text_are_bounded(patient: Renderer, messages: bytes) -> None:
    error = outcome(patient, messages)
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INVALID_ARG


def test_a_checkpoint_without_a_template_says_so(tmp_path: Path) -> None:
    made = Renderer(tmp_path)
    error = outcome(made, chat("hello"))
    made.close()
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "cannot be compiled"),
        ("{{ 'x' * 99999999999 }}{{ messages }}", None),
        ("{% for m in messages %}" * 500, "chat template"),
    ],
)
def test_a_broken_template_is_a_sentence_at_the_start(tmp_path: Path, source: str, sentence: str | None) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    if sentence is None:
        made = Renderer(tmp_path)
        assert isinstance(outcome(made, chat("hello")), RequestError)
        made.close()
        return
    with pytest.raises(RequestError, match=sentence):
        Renderer(tmp_path)


def test_a_template_that_takes_for_ever_to_compile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "_START_S", 1.0)
    (tmp_path / "chat_template.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    with pytest.raises(RequestError, match="takes too much time or memory"):
        Renderer(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={"role": st.sampled_from(["user", "assistant"]) | JSON, "content": JSON, "tool_calls": JSON, "name": JSON},
)
FIELDS = st.dictionaries(
    st.sampled_from(["tools", "documents", "add_generation_prompt", "continue_final_message", "messages", "x", "self"]),
    JSON,
    max_size=3,
)


@given(st.lists(MESSAGE | JSON, max_size=3), FIELDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_messages_and_fields_are_a_text_or_a_refusal(patient: Renderer, messages: Any, fields: Any) -> None:
    result = outcome(patient, json.dumps(messages).encode(), json.dumps(fields).encode())
    assert isinstance(result, str) or (result.message and "Traceback" not in result.message)


@given(st.binary(max_size=40), st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_are_a_text_or_a_refusal(patient: Renderer, messages: bytes, parameters: bytes) -> None:
    assert isinstance(outcome(patient, messages, parameters), str | RequestError)


PIECES = [
    "{{",
    "}}",
    "{%",
    "%}",
    "for m in messages",
    "endfor",
    "if",
    "m.content",
    "|",
    "tojson",
    "(",
    ")",
    "~",
    "'x'",
    "1/0",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12))
@settings(deadline=None)
def test_any_template_is_read_or_refused(pieces: list[str]) -> None:
    try:
        ChatTemplate({"default": " ".join(pieces)}).render([{"role": "user", "content": "x"}])
    except RequestError:
        return


def test_a_file_and_then_a_request_stand_in_for_the_checkpoints_template(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("file: {{ messages[0].content }}")
    made = Renderer(folder, most_s=30.0, file=file)
    try:
        assert made.render(chat("x"), None) == "file: x"
        assert made.render(chat("x"), b'{"chat_template": "own: {{ messages[0].content }}"}') == "own: x"
        for value, why in ((5, "must be a string"), ("x" * 70_000, "at most 65536"), ("{% if %}", "not valid Jinja")):
            with pytest.raises(RequestError, match=why):
                made.render(chat("x"), json.dumps({"chat_template": value}).encode())
        assert made.render(chat("x"), None) == "file: x"
    finally:
        made.close()
