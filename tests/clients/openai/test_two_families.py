"""One shim before three models of a real server, each of which writes calls and thinking in its own form."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import openai
import pytest

from clients.python.local_server import LocalServer
from engine.serving.launch import repository
from tests.clients import scripted_checkpoint
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

OTHER = "{% if never %}{{ '<|start_header_id|>' + '\"parameters\": ' }}{% endif %}"
OPENED = "{% if enable_thinking is not defined %}{{ '<think>' }}{% endif %}"
SCRIPTS = {">": scripted_checkpoint.SCRIPTS["o"], "l": scripted_checkpoint.SCRIPTS["l"]}
CHANNELS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
ON_CHANNELS: dict[str, list[str | bytes]] = {
    "t": [
        "<|chan", "nel|>analysis<|message|>I look", " it up.<|en", "d|><|start|>assis",
        "tant<|channel|>commentary to=func", "tions.get_time <|constrain|>json<|mess",
        'age|>{"zone": "U', 'TC"}<|call|>',
    ],
    ">": ['{"n"', ": 5}"],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_time"}}
ZONES = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
COMMENTARY = {"69": 100}  # the letter c: no thinking, which this model would not end
ZONED = {"type": "function", "function": {"name": "get_time", "parameters": ZONES}}


def test_each_models_answers_are_read_in_its_own_form(tmp_path: Path) -> None:
    models = tmp_path / "models"
    usual = "{scripted}"
    for name, template, scripts in (
        ("usual", usual, scripted_checkpoint.SCRIPTS),
        ("other", OTHER + usual + OPENED, SCRIPTS),
        ("channels", CHANNELS, ON_CHANNELS),
    ):
        folder = tmp_path / name
        scripted_checkpoint.make(folder, scripts)
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config["chat_template"] = template.replace(usual, config["chat_template"])
        settings = {}
        if name == "channels":  # named and templated by whoever added it
            given = tmp_path / "given.jinja"
            given.write_text(config.pop("chat_template"))
            settings = {"served_names": '["gpt", "org/gpt"]', "chat_template": str(given)}
            (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": -5, "max_new_tokens": 9}')
        file.write_text(json.dumps(config))
        repository.add(folder, name, models, settings=settings, tokenizer=True, ensemble=False, frontends=1)
    with LocalServer(models) as server:
        triton = f"{server.grpc}:{server.metrics.rsplit(':', 1)[1]}"
        shim = Shim(tmp_path, "--triton", triton)
        try:
            client = openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)

            def answer(model: str, script: str, **fields: object) -> openai.types.chat.ChatCompletionMessage:
                messages = [{"role": "user", "content": script}]
                made = client.chat.completions.create(model=model, messages=messages, temperature=0, **fields)
                return made.choices[0].message

            thought = answer("other", "o")
            assert (thought.reasoning_content, thought.content) == ("Hidden thought", "Shown.")
            assert "Hidden thought" in answer("usual", "o").content
            # Of "Hidden th|ought</thi|nk>..." one token may come, then the end of thinking is all that may.
            budget = {"extra_body": {"thinking_token_budget": 1}, "max_tokens": 12}
            short = answer("other", "o", **budget)
            assert short.reasoning_content == "Hidden th"
            # The template was told not to open it, and did not: the same model's answer is text from its beginning.
            off = {"tools": [TOOL], "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
            (call,) = answer("other", "l", **off).tool_calls
            assert (call.function.name, call.function.arguments) == ("get_time", '{"zone": "UTC"}')
            assert answer("usual", "l", **off).tool_calls is None
            said = answer("channels", "x", tools=[TOOL])
            assert (said.reasoning_content, said.content) == ("I look it up.", None)
            (call,) = said.tool_calls
            assert (call.function.name, call.function.arguments) == ("get_time", '{"zone": "UTC"}')
            bound = answer("channels", "x", response_format={"type": "json_object"})
            assert (bound.content, hasattr(bound, "reasoning_content")) == ('{"n": 5}', False)
            listed = {card.id: card.root for card in client.models.list()}
            assert listed == {"usual": "usual", "other": "other"} | dict.fromkeys(
                ("channels", "gpt", "org/gpt"), "channels"
            )
            # Its generation_config.json: greedy, and 9 tokens at most; what no request could send is left out.
            fields = {"model": "org/gpt", "messages": [{"role": "user", "content": "x"}]}
            drawn = client.chat.completions.create(**fields, tools=[TOOL], max_tokens=100)
            assert drawn.choices[0].message.tool_calls[0].function.arguments == '{"zone": "UTC"}'
            cut = client.completions.create(model="gpt", prompt="s", max_tokens=100)
            assert cut.usage.completion_tokens <= 9
            own = {"chat_template": "{{ messages[0].content }}<|start|>assistant<|channel|>final<|message|>"}
            with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
                client.chat.completions.create(**fields, extra_body=own)
            trusting = Shim(
                tmp_path, "--triton", triton, "--trust-request-chat-template", "--generation-config", "none"
            )
            try:
                client = openai.OpenAI(base_url=f"{trusting.url}/v1", api_key="none", max_retries=0)
                said = client.chat.completions.create(**fields, extra_body=own, temperature=0).choices[0].message
                assert said.content == '{"n": 5}'
                for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
                    must = {"tools": [ZONED], "tool_choice": choice, "max_tokens": 400, "seed": 1}
                    made = client.chat.completions.create(**fields, **must, logit_bias=COMMENTARY).choices[0]
                    (call,) = made.message.tool_calls
                    assert made.message.content is None
                    jsonschema.validate(json.loads(call.function.arguments), ZONES)
                for broken, why in (("{% if %}", "not valid Jinja"), ("x" * 70_000, "65536")):
                    with pytest.raises(openai.BadRequestError, match=why):
                        client.chat.completions.create(**fields, extra_body={"chat_template": broken})
                free = client.completions.create(
                    model="gpt", prompt="s", max_tokens=40, extra_body={"ignore_eos": True}
                )
                assert free.usage.completion_tokens == 40
            finally:
                trusting.stop()
        finally:
            shim.stop()
