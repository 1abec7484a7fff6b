"""The fields of a request that the page offers."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from clients.openai.schema import ChatRequest, Sampling
from tests.clients.web.said import say
from tests.clients.web.stand_in import StandIn

# Fields of a request that the page has no box for: what "Further fields" is for, what cannot be streamed, older names.
pytestmark = pytest.mark.xdist_group("web")  # a browser for all

FURTHER = {
    "add_special_tokens", "cache_salt", "request_id", "return_token_ids", "return_tokens_as_token_ids", "speculation",
    "timeout", "truncate_prompt_tokens", "user",
}  # fmt: skip
NOT_STREAMED = {"prompt_logprobs"}
OLDER_NAMES = {
    "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "structural_tag",
}  # fmt: skip


def test_every_field_is_sent_and_remembered(chat: Page, stand_in: StandIn) -> None:
    chat.click("#open-settings")
    for name in ("Penalties and lengths", "Beam search", "Words and tokens", "Form of the answer", "More"):
        chat.get_by_text(name, exact=True).click()
    numbers = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "n": 2,
        "length_penalty": 1.2,
        "max_tokens": 99,
        "min_tokens": 2,
        "thinking_token_budget": 50,
    }
    numbers |= {"presence_penalty": 0.1, "frequency_penalty": -0.1, "repetition_penalty": 1.1}
    for name, value in numbers.items():
        chat.fill(f"#{name}", str(value))
    chat.fill("#system", "Be short.")
    chat.fill("#stop", "END\n###")
    chat.fill("#response_format", '{"type": "object"}')
    chat.fill("#tools", '[{"type": "function", "function": {"name": "f"}}]')
    chat.fill("#bad_words", "no\nnever")
    chat.fill("#logit_bias", '{"42": -5}')
    chat.fill("#allowed_token_ids", "1, 2 42")
    chat.fill("#stop_token_ids", "2")
    chat.fill("#reasoning_effort", "low")
    chat.fill("#structured_outputs", '{"regex": "[0-9]+"}')
    for name in ("include_stop_str_in_output", "show_special", "use_beam_search", "early_stopping", "logprobs"):
        chat.check(f"#{name}")
    chat.fill("#more", '{"priority": 3}')
    chat.select_option("#thinking", "false")
    chat.check("#ignore_eos")
    chat.reload()
    say(chat, "One.")
    body = stand_in.requests[-1]
    numbers["max_completion_tokens"] = numbers.pop("max_tokens")
    assert {name: body[name] for name in numbers} == numbers
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    assert body["stop"] == ["END", "###"]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["tools"][0]["function"] == {"name": "f"}
    assert body["logit_bias"] == {"42": -5}
    assert (body["bad_words"], body["allowed_token_ids"], body["stop_token_ids"]) == (["no", "never"], [1, 2, 42], [2])
    assert (body["reasoning_effort"], body["priority"]) == ("low", 3)
    assert (body["include_stop_str_in_output"], body["skip_special_tokens"]) == (True, False)
    assert (body["use_beam_search"], body["early_stopping"]) == (True, True)
    assert body["structured_outputs"] == {"regex": "[0-9]+"}
    assert set(body) <= set(ChatRequest.model_fields), "every field is one of the API's"
    missing = set(Sampling.model_fields) - set(body)
    assert missing == FURTHER | NOT_STREAMED | OLDER_NAMES | {"max_tokens"}, "docs/chat_page.md names the others"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["ignore_eos"] is True
    chat.get_by_text("Words and tokens", exact=True).click()
    chat.fill("#stop_token_ids", "2, two")
    chat.fill("#text", "Two.")
    chat.press("#text", "Enter")
    expect(chat.locator(".error[role=alert]")).to_contain_text(
        "The stop token ids under Settings are whole numbers; two"
    )
    chat.fill("#stop_token_ids", "")
    chat.get_by_text("More", exact=True).click()
    chat.fill("#more", "[")
    chat.fill("#text", "Two.")
    chat.press("#text", "Enter")
    expect(chat.locator(".error[role=alert]").last).to_contain_text(
        "Further fields under Settings cannot be read as JSON"
    )
    expect(chat.locator("#text")).to_have_value("Two.")
    chat.click("#reset")
    assert chat.input_value("#more") == ""
