"""One shim before two models of a real server, each of which writes calls and thinking in its own form."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from clients.python.local_server import LocalServer
from engine.serving import repository
from tests.clients import scripted_checkpoint
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

OTHER = "{% if never %}{{ '<|start_header_id|>' + '\"parameters\": ' }}{% endif %}"
OPENED = "{% if enable_thinking is not defined %}{{ '<think>' }}{% endif %}"
SCRIPTS = {">": scripted_checkpoint.SCRIPTS["o"], "l": scripted_checkpoint.SCRIPTS["l"]}
TOOL = {"type": "function", "function": {"name": "get_time"}}


def test_each_models_answers_are_read_in_its_own_form(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name, before, behind, scripts in (
        ("usual", "", "", scripted_checkpoint.SCRIPTS),
        ("other", OTHER, OPENED, SCRIPTS),
    ):
        folder = tmp_path / name
        scripted_checkpoint.make(folder, scripts)
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "chat_template": before + config["chat_template"] + behind}))
        repository.add(folder, name, models, settings={}, tokenizer=True, ensemble=False, frontends=1)
    with LocalServer(models) as server:
        shim = Shim(tmp_path, "--triton", f"{server.grpc}:{server.metrics.rsplit(':', 1)[1]}")
        try:
            client = openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)

            def answer(model: str, script: str, **fields: object) -> openai.types.chat.ChatCompletionMessage:
                messages = [{"role": "user", "content": script}]
                made = client.chat.completions.create(model=model, messages=messages, temperature=0, **fields)
                return made.choices[0].message

            thought = answer("other", "o")
            assert (thought.reasoning_content, thought.content) == ("Hidden thought", "Shown.")
            assert "Hidden thought" in answer("usual", "o").content
            # The template was told not to open it, and did not: the same model's answer is text from its beginning.
            off = {"tools": [TOOL], "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
            (call,) = answer("other", "l", **off).tool_calls
            assert (call.function.name, call.function.arguments) == ("get_time", '{"zone": "UTC"}')
            assert answer("usual", "l", **off).tool_calls is None
        finally:
            shim.stop()
