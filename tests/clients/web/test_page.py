"""The web page in a real browser, over a real server."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from playwright.sync_api import Page, expect

from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim, gauges

pytestmark = pytest.mark.xdist_group("openai")

expect.set_options(timeout=30_000)

HELLO = "Hello there, 20 \u00b0C out."


def open_chat(page: Page, shim: Shim, model: str = "scripted") -> None:
    page.goto(shim.url)
    expect(page.locator("#model option")).to_have_count(2)
    page.select_option("#model", model)
    page.click("#open-settings")
    page.fill("#temperature", "0")


def colour(page: Page) -> None:
    page.get_by_text("Form of the answer", exact=True).click()
    page.check("#logprobs")


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_an_answer_is_streamed_into_the_page(page: Page, shim: Shim) -> None:
    open_chat(page, shim)
    say(page, "h")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".what")).to_have_text(HELLO)
    expect(answer.locator(".facts")).to_contain_text(re.compile(r"^first token \d+ ms · 6 tokens .*from cache$"))
    expect(page.locator(".message.user .what")).to_have_text("h")
    say(page, "h")
    expect(page.locator(".message.assistant")).to_have_count(2)
    page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#conversations li")).to_have_count(1)


def test_two_answers_to_one_message_are_two_versions(page: Page, shim: Shim) -> None:
    open_chat(page, shim)
    page.fill("#n", "2")
    say(page, "h")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".facts")).to_contain_text("12 tokens in 2 answers")
    expect(answer.locator(".versions")).to_have_text("1 of 2")
    expect(answer.locator(".what")).to_have_text(HELLO)
    page.click("[aria-label='Version after']")
    expect(answer.locator(".what")).to_have_text(HELLO)


def test_thinking_is_folded_away(page: Page, shim: Shim) -> None:
    open_chat(page, shim)
    say(page, "t")
    expect(page.locator(".message.assistant .what")).to_have_text("The answer.")
    expect(page.locator("details.thinking")).to_contain_text("Let me see.")


def test_tokens_are_coloured_by_probability(page: Page, shim: Shim) -> None:
    open_chat(page, shim, "demo")
    colour(page)
    page.fill("#max_tokens", "12")
    say(page, "What is a list?")
    tokens = page.locator(".message.assistant .token")
    expect(page.locator(".facts")).to_contain_text("12 tokens")
    assert tokens.count() == 12
    for n in range(12):
        probability = float(tokens.nth(n).get_attribute("data-probability") or "nan")
        assert 0 <= probability <= 1
    assert "%" in (tokens.nth(0).get_attribute("title") or "")
    assert tokens.nth(0).evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"


def test_a_character_of_several_tokens_is_coloured_as_one(page: Page, shim: Shim) -> None:
    open_chat(page, shim)
    colour(page)
    say(page, "h")
    expect(page.locator(".message.assistant .what")).to_contain_text(HELLO)


def test_a_new_chat_knows_nothing_of_the_one_that_is_being_answered(page: Page, shim: Shim) -> None:
    open_chat(page, shim, "demo")
    page.fill("#max_tokens", "6000")
    say(page, "Tell me a long story.")
    expect(page.locator(".message.assistant .what")).to_have_text(re.compile(".{5}"))
    page.click("#clear")
    expect(page.locator("#send")).to_be_enabled()
    page.fill("#max_tokens", "2")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Again.")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Again."}]
    page.click("#conversations >> text=Tell me a long story.")  # it went on meanwhile
    page.click("#stop-button")
    expect(page.locator(".message.assistant .facts")).to_contain_text("stopped")


def test_the_stop_button_stops_the_engine(page: Page, shim: Shim, server: LocalServer) -> None:
    open_chat(page, shim, "demo")
    page.fill("#max_tokens", "6000")
    page.fill("#seed", "3")
    say(page, "Tell me a long story.")
    expect(page.locator(".message.assistant .what")).to_have_text(re.compile(".{5}"))
    page.click("#stop-button")
    expect(page.locator(".message.assistant").last.locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    end = time.monotonic() + 5
    while gauges(server)["num_requests_running"]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_gauges_are_live(page: Page, shim: Shim) -> None:
    open_chat(page, shim, "demo")
    expect(page.locator("#g-replicas")).to_have_text("1 of 1")
    expect(page.locator("#g-running")).to_have_text("0")
    body = {"model": "demo", "prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{shim.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_bytes()
        next(pieces)
        expect(page.locator("#g-running")).to_have_text("1")
        expect(page.locator("#g-rate")).to_have_text(re.compile(r"[1-9]"))
    expect(page.locator("#g-running")).to_have_text("0")


def test_an_error_is_shown_as_a_sentence(browser_page: Page, shim: Shim) -> None:
    open_chat(browser_page, shim)
    browser_page.fill("#temperature", "3")
    say(browser_page, "h")
    expect(browser_page.locator(".error[role=alert]")).to_contain_text("temperature")
    # What was refused can be sent again, and is not sent twice.
    expect(browser_page.locator("#text")).to_have_value("h")
    browser_page.fill("#temperature", "0")
    with browser_page.expect_request("**/v1/chat/completions") as sent:
        browser_page.press("#text", "Enter")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "h"}]


def test_the_api_page_lists_every_operation(page: Page, shim: Shim) -> None:
    page.goto(f"{shim.url}/docs")
    paths = httpx.get(f"{shim.url}/openapi.json").json()["paths"]
    expect(page.locator("#paths > details")).to_have_count(sum(map(len, paths.values())))
    page.click("text=POST /v1/chat/completions")
    expect(page.locator("details[open]")).to_contain_text("max_completion_tokens")


def test_the_api_page_tries_a_call(page: Page, shim: Shim) -> None:
    page.goto(f"{shim.url}/docs")
    page.click("text=POST /v1/chat/completions")
    page.get_by_role("button", name="Try it").click()
    answer = page.get_by_label("Answer")
    expect(answer).to_contain_text("data: [DONE]")
    expect(page.locator(".try [role=status]")).to_contain_text("200 OK")
    page.click("text=GET /v1/models/{model}")
    expect(page.locator(".try")).to_have_count(2)
    page.get_by_role("button", name="Try it").last.click()
    expect(answer.last).to_contain_text('"object": "model"')


@pytest.fixture
def browser_page(browser: object) -> object:
    """A page whose console may show a failed request."""
    from playwright.sync_api import Browser

    assert isinstance(browser, Browser)
    context = browser.new_context()
    yield context.new_page()
    context.close()
