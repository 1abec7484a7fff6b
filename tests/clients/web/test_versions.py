"""Versions of messages and answers: asked again, edited, branched off, and several answers to one message."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.clients.web.said import say
from tests.clients.web.stand_in import StandIn

pytestmark = pytest.mark.xdist_group("web")  # a browser for all


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .title").all_text_contents()


def test_answers_and_messages_have_versions(chat: Page, stand_in: StandIn) -> None:
    say(chat, "One.")
    say(chat, "Two.")
    chat.locator(".message.user").first.hover()
    chat.locator(".message.user").first.locator("button[aria-label=Edit]").click()
    chat.fill("[aria-label='Edit the message']", "Other.")
    chat.press("[aria-label='Edit the message']", "Enter")
    expect(chat.locator(".message.assistant")).to_have_count(1)
    expect(chat.locator(".message.assistant .what")).to_have_text("You said: Other.")
    assert [message["content"] for message in stand_in.requests[-1]["messages"]] == ["Other."]
    expect(chat.locator(".versions")).to_have_text("2 of 2")
    chat.click("[aria-label='Version before']")
    expect(chat.locator(".message")).to_have_count(4)
    chat.locator("[aria-label='Answer again']").last.click()
    expect(chat.locator(".message.assistant .versions")).to_have_text("2 of 2")
    expect(chat.locator("#send")).to_be_visible()
    assert [message["content"] for message in stand_in.requests[-1]["messages"]] == ["One.", "You said: One.", "Two."]
    chat.locator("[aria-label='Branch into a new conversation']").nth(1).click()
    expect(chat.locator(".message")).to_have_count(2)
    assert titles(chat) == ["One. (branch)", "One."]


def test_several_answers_are_versions_each_streamed_by_its_index(chat: Page, stand_in: StandIn) -> None:
    chat.click("#open-settings")
    chat.fill("#n", "3")
    stand_in.held.clear()
    try:
        chat.fill("#text", "How do threads share work?")
        chat.press("#text", "Enter")
        answer = chat.locator(".message.assistant")
        expect(answer.locator(".versions")).to_have_text("1 of 3")
        expect(answer.locator(".what")).to_contain_text("1: A queue hands items")
        chat.click("[aria-label='Version after']")
        expect(answer.locator(".versions")).to_have_text("2 of 3")
        expect(chat.locator(".message.live .what")).to_contain_text("2: A queue hands items")
    finally:
        stand_in.held.set()
    expect(answer.locator(".facts")).to_contain_text("7 tokens in 3 answers")
    expect(answer.locator(".what")).to_contain_text("2: ")
    expect(chat.locator("#status")).to_contain_text("The first of 3 answers: 1: A")
    assert stand_in.requests[-1]["n"] == 3
    say(chat, "Go on.")
    _, shown, _ = stand_in.requests[-1]["messages"]
    assert shown["content"].startswith("2: A **queue**"), "the conversation goes on behind the answer that is shown"
    chat.locator("[aria-label='Answer again']").last.click()
    expect(chat.locator(".message.assistant .versions").last).to_have_text("4 of 6")
    expect(chat.locator("#send")).to_be_visible()
    chat.reload()
    expect(chat.locator(".message.assistant .versions")).to_have_text(["2 of 3", "4 of 6"])


def test_of_several_answers_that_are_refused_nothing_stays(browser: Browser, stand_in: StandIn) -> None:
    context = browser.new_context()  # whose console may show the refusals
    page = context.new_page()
    page.goto(stand_in.url)
    expect(page.locator("#model option")).to_have_count(2)
    page.click("#open-settings")
    page.get_by_text("Form of the answer", exact=True).click()
    page.fill("#n", "2")
    page.fill("#text", "Refuse.")
    page.press("#text", "Enter")
    expect(page.locator(".error[role=alert]")).to_be_visible()
    expect(page.locator("#text")).to_have_value("Refuse.")
    expect(page.locator(".message.assistant")).to_have_count(0)
    expect(page.locator("#conversations li")).to_have_text("Nothing yet.")
    say(page, "One.")
    page.hover(".message.user")
    page.click("[aria-label=Edit]")
    page.fill("[aria-label='Edit the message']", "Refuse.")
    page.press("[aria-label='Edit the message']", "Enter")
    expect(page.locator(".error[role=alert]")).to_have_text("`temperature` must be at most 2.")
    expect(page.locator(".message .what")).to_have_text(["One.", "1: You said: One."])
    page.fill("#tools", "[")
    page.click("[aria-label='Answer again']")
    expect(page.locator(".error[role=alert]")).to_contain_text("Tools under Settings cannot be read")
    expect(page.locator(".message .what")).to_have_text(["One.", "1: You said: One."])
    context.close()
