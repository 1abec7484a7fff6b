"""Templates that never end, and what else is thrown at a tokenizer model: each costs its own request alone."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from engine.serving.launch import repository
from tests.e2e.harness import Call, Server, wait_until

TEMPLATE = """
{%- for message in messages -%}
  {%- if message.content == "loop" -%}
    {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
  {%- elif message.content == "overflow" -%}{{- 10.0 ** 400 -}}
  {%- elif message.content == "zero" -%}{{- 1 // 0 -}}
  {%- elif message.content == "memory" -%}{{- message.content * 999999999999 -}}
  {%- elif message.content == "deep" -%}{%- macro down() -%}{{- down() -}}{%- endmacro -%}{{- down() -}}
  {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def model(server: Server, models: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tokenizer with a chat template that does what its messages say."""
    folder = tmp_path_factory.mktemp("hostile") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    repository.write_tokenizer(models, "hostile", {"model": str(folder)})
    assert server.load("hostile") is None
    yield "hostile"
    server.unload("hostile")
    shutil.rmtree(models / "hostile")


def ask(server: Server, model: str, **texts: Any) -> tuple[int, dict[str, Any]]:
    inputs = [
        {
            "name": name,
            "datatype": "BYTES",
            "shape": [1],
            "data": [value if isinstance(value, str) else json.dumps(value)],
        }
        for name, value in texts.items()
    ]
    status, body = server.post(f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode())
    return status, json.loads(body)


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_chat_that_can_only_be_too_long_is_not_tokenized(server: Server, model: str) -> None:
    text = "a" * (2 << 20)
    body = {
        "inputs": [{"name": "messages", "datatype": "BYTES", "shape": [1], "data": [json.dumps(chat(text))]}],
        "parameters": {"max_model_len": 512},
    }
    status, answer = server.post(f"/v2/models/{model}/infer", json.dumps(body).encode())
    assert status == 400
    assert re.search(
        r"the prompt of 2097152 bytes has \d+ tokens or more, but at most 511 can be served", answer.decode()
    )
    body["parameters"] = {"max_model_len": 4 << 20}
    status, answer = server.post(f"/v2/models/{model}/infer", json.dumps(body).encode())
    assert status == 200
    body["parameters"] = {"max_model_len": "much"}
    status, answer = server.post(f"/v2/models/{model}/infer", json.dumps(body).encode())
    assert (status, b"max_model_len must be a number of tokens" in answer) == (400, True)


def renderers(folder_name: str) -> list[int]:
    """Processes that render with the template of a checkpoint in such a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"engine.serving.frontend.renderer" in words and f"/{folder_name}".encode() in words[-2]:
            found.append(int(folder.name))
    return found


def test_a_template_that_loops_ends_with_a_sentence_and_the_others_do_not_wait(server: Server, model: str) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    looping = threading.Thread(target=lambda: answers.append(ask(server, model, messages=chat("loop"))))
    looping.start()
    beside = 0
    while looping.is_alive():
        assert ask(server, model, messages=chat("hello"))[0] == 200
        assert ask(server, model, text_input="hello")[0] == 200
        beside += looping.is_alive()
    assert beside > 3
    ((status, body),) = answers
    assert status == 400
    assert "the chat template took more than 3 s" in body["error"]


@pytest.mark.parametrize("content", ["overflow", "zero", "memory", "deep"])
def test_a_template_that_fails_is_a_400_with_a_sentence(server: Server, model: str, content: str) -> None:
    status, body = ask(server, model, messages=chat(content))
    assert status == 400
    assert "the chat template" in body["error"]
    assert "Traceback" not in body["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}]},
        {"messages": chat("x"), "template_parameters": {"tools": 5}},
        {"messages": chat("x"), "template_parameters": {"documents": [1]}},
        {"messages": chat("x"), "template_parameters": {"add_generation_prompt": "maybe"}},
        {"messages": "[" * 100_000},
        {"messages": "[" * 100_000, "template_parameters": "}"},
        {"text_input": "x", "messages": "[]"},
    ],
)
def test_wrong_messages_are_a_400_without_a_trace(server: Server, model: str, fields: dict[str, Any]) -> None:
    status, body = ask(server, model, **fields)
    assert status == 400
    assert "Traceback" not in body["error"]
    assert str(Path(__file__).parents[2]) not in body["error"]
    assert len(body["error"]) < 500


LARGE = "a b " * 265_000
SEVERAL = 12  # four more than threads that answer requests at the same time


def test_texts_of_megabytes_hold_no_other_text_up(server: Server, model: str) -> None:
    """They took all threads of the tokenizer, for seconds each."""
    large = [Call(server, model, text_input=LARGE) for _ in range(SEVERAL)]
    wait_until(lambda: any(one.arrived for one in large), "the first is answered")
    assert Call(server, model, text_input="small").all()
    assert sum(one.arrived for one in large) < 5
    assert all(one.all() for one in large)


def test_prompts_of_megabytes_hold_no_other_prompt_up(server: Server) -> None:
    """They cannot fit the context: none is tokenized."""
    large = [Call(server, text_input=LARGE, max_tokens=2, stream=True) for _ in range(SEVERAL)]
    for _ in range(4):  # each goes to the frontend that is next
        assert Call(server, text_input="small", max_tokens=2, stream=True).all()
    for one in large:
        with pytest.raises(InferenceServerException, match=r"the prompt of \d+ bytes has \d+ tokens or more"):
            one.all()


def test_unloading_ends_the_processes_that_render(server: Server, model: str) -> None:
    assert ask(server, model, messages=chat("hello"))[0] == 200
    found = renderers("hostile")
    assert found
    server.unload(model)
    wait_until(lambda: not set(renderers("hostile")) & set(found), "the processes have ended")
    assert server.load(model) is None
