"""What the page does with an answer: Markdown, hostile text, the list of conversations, keys, accessibility.

The text comes from a stand-in: no small model writes a table or an attack when it is asked to.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from tests.clients.web.said import ATTACKS, MARKDOWN, say
from tests.clients.web.stand_in import StandIn

pytestmark = pytest.mark.xdist_group("web")  # a browser for all

FOCUSED = """() => {
  const at = document.activeElement;
  return [at.id || at.getAttribute("aria-label"), getComputedStyle(at).outlineStyle];
}"""


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .title").all_text_contents()


def test_markdown_is_shown_and_code_can_be_copied(chat: Page, stand_in: StandIn) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=stand_in.url)
    say(chat, "How do threads share work?")
    answer = chat.locator(".message.assistant .what")
    expect(answer.locator("strong")).to_have_text("queue")
    expect(answer.locator("td")).to_have_count(9)
    expect(answer.locator("td.right").first).to_have_text("yes")
    expect(answer.locator("ol li")).to_have_count(2)
    expect(answer.locator(".hljs-keyword").first).to_have_text("from")
    link = answer.locator("a")
    assert link.get_attribute("target") == "_blank"
    assert "noopener" in (link.get_attribute("rel") or "")
    expect(chat.locator("details.thinking")).not_to_have_attribute("open", "")
    expect(chat.locator("details.thinking")).to_contain_text("The user asks about queues.")
    chat.click(".copy-code")
    expect(chat.locator(".copy-code")).to_have_text("Copied")
    assert chat.evaluate("navigator.clipboard.readText()") == MARKDOWN.split("```")[1].removeprefix("python\n")
    chat.click(".message.assistant button[aria-label=Copy]")
    expect(chat.locator("#status")).to_have_text("Message copied.")
    assert chat.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_nothing_that_a_model_writes_runs_or_leaves_the_page(chat: Page) -> None:
    elsewhere: list[str] = []
    chat.on("request", lambda request: elsewhere.append(request.url) if "example.org" in request.url else None)
    say(chat, "Attack.")
    say(chat, ATTACKS[1])  # a user's message, and the stand-in's echo of it
    bad = "script, img, svg, iframe, style, form, input, base, math, [onerror], [onload], [style]"
    assert chat.locator(".message .what").locator(bad).count() == 0
    links = chat.locator("#messages a").evaluate_all("all => all.map((link) => link.protocol)")
    assert set(links) <= {"https:"}
    expect(chat.locator(".message.user .what").last).to_have_text(ATTACKS[1])
    expect(chat.locator(".message.assistant .what").first).to_contain_text(ATTACKS[0])
    assert chat.evaluate("window.hit") is None
    assert elsewhere == []


def test_the_policy_holds_scripts_and_html_from_strings_off(browser: Browser, stand_in: StandIn) -> None:
    context = browser.new_context()
    page = context.new_page()
    response = page.goto(stand_in.url)
    assert response is not None
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    blocked = "() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"
    assert page.evaluate(blocked)
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('img'), {src: 'https://example.org/x.png'}))"
    )
    context.close()


def test_a_stream_can_be_read_and_selected_before_it_ends(chat: Page, stand_in: StandIn) -> None:
    stand_in.held.clear()
    try:
        chat.fill("#text", "How do threads share work?")
        chat.press("#text", "Enter")
        expect(chat.locator(".message.live td")).to_have_count(9)
        expect(chat.locator("#status")).to_have_text("qwen3-4b is answering.")  # and not every token
        chat.evaluate("document.querySelector('.message.live .what p').mark = 1")
    finally:
        stand_in.held.set()
    expect(chat.locator(".facts")).to_contain_text("prompt 31, 16 from cache")
    expect(chat.locator("#status")).to_contain_text("The answer: A **queue**")


def test_conversations_are_kept_listed_and_deleted(chat: Page) -> None:
    say(chat, "Apples and pears.")
    chat.keyboard.press("Control+Shift+O")
    say(chat, "Ships.")
    chat.reload()
    expect(chat.locator(".message.assistant .what")).to_have_text("You said: Ships.")
    assert titles(chat) == ["Ships.", "Apples and pears."]
    chat.keyboard.press("Control+k")
    chat.keyboard.type("pears")
    expect(chat.locator("#conversations .title")).to_have_count(1)
    chat.hover("#conversations li")
    chat.click("[aria-label='Rename Apples and pears.']")
    chat.keyboard.type("Fruit")
    chat.keyboard.press("Enter")
    chat.fill("#search", "")
    chat.reload()
    expect(chat.locator("#conversations .title")).to_have_text(["Ships.", "Fruit"])
    chat.hover("#conversations li >> nth=1")
    chat.click("[aria-label='Delete Fruit']")
    expect(chat.locator("#conversations .title")).to_have_text(["Ships."])
    chat.click("#toast >> text=Undo")
    expect(chat.locator("#conversations .title")).to_have_text(["Fruit", "Ships."])
    chat.click("#delete-all")
    chat.click("#confirm >> text=Keep them")
    assert titles(chat) == ["Fruit", "Ships."]
    chat.click("#delete-all")
    chat.click("#confirm button.danger")
    expect(chat.locator("#conversations .title")).to_have_count(0)
    chat.reload()
    expect(chat.locator("#conversations")).to_have_text("Nothing yet.")


def test_conversations_go_to_a_file_and_come_back(chat: Page, tmp_path: Path) -> None:
    say(chat, "How do threads share work?")
    with chat.expect_download() as saved:
        chat.click("#export-all")
    saved.value.save_as(tmp_path / "all.json")
    chat.hover("#conversations li")
    with chat.expect_download() as one:
        chat.click("[aria-label^='Export How do']")
    one.value.save_as(tmp_path / "one.md")
    assert MARKDOWN in (tmp_path / "one.md").read_text()
    chat.click("#delete-all")
    chat.click("#confirm button.danger")
    chat.set_input_files("#import-file", tmp_path / "all.json")
    expect(chat.locator("#toast")).to_contain_text("1 conversation was imported.")
    expect(chat.locator(".message.assistant td")).to_have_count(9)
    for wrong, why in (
        ("{", "JSON"),
        ('{"a": 1}', "nodes"),
        (json.dumps({"nodes": {"a": {"role": "system"}}}), "role"),
    ):
        (tmp_path / "wrong.json").write_text(wrong)
        chat.set_input_files("#import-file", tmp_path / "wrong.json")
        expect(chat.locator("#toast")).to_contain_text(why)


def test_calls_are_shown_and_take_their_results(chat: Page, stand_in: StandIn) -> None:
    say(chat, "Weather?")
    expect(chat.locator(".call summary")).to_have_text("Calls get_weather")
    expect(chat.locator(".call pre")).to_contain_text('"city": "Paris"')
    assert chat.get_attribute("#text", "placeholder") == "Result of get_weather"
    say(chat, "20 degrees")
    sent = stand_in.requests[-1]["messages"]
    assert (sent[1]["content"], sent[1]["reasoning_content"]) == ("I look.", "A tool knows."), (
        "models need both after a call"
    )
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"}


def test_an_example_is_asked_by_a_click_and_the_keyboard_goes_on(chat: Page, stand_in: StandIn) -> None:
    chat.get_by_role("button", name="What is a thread?").click()
    expect(chat.locator(".message.assistant .what")).to_have_text("You said: What is a thread?")
    expect(chat.locator("#text")).to_be_focused()
    said, answer = chat.locator(".message.user .what").bounding_box(), chat.locator(".message.assistant").bounding_box()
    assert said is not None
    assert answer is not None
    assert answer["y"] - said["y"] - said["height"] < 40, "no empty line between a message and its answer"


@pytest.mark.parametrize("said", ["written", "hint"])
def test_what_is_said_while_the_page_begins_is_answered(page: Page, stand_in: StandIn, said: str) -> None:
    stand_in.requests.clear()
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    with page.expect_request("**/v1/models"):
        page.goto(stand_in.url)
    if said == "written":
        page.fill("#text", "What is a thread?")
        page.press("#text", "Enter")
        expect(page.locator("#text")).to_have_value("What is a thread?")
    else:
        page.get_by_role("button", name="What is a thread?").click()
    assert stand_in.requests == [], "no model is known yet"
    held[0].continue_()
    expect(page.locator(".message.assistant .what")).to_have_text("You said: What is a thread?")
    expect(page.locator("#send")).to_be_visible()
    assert [request["model"] for request in stand_in.requests] == ["qwen3-4b"]
    assert titles(page) == ["What is a thread?"]
    page.unroute_all()
    page.reload()
    expect(page.locator(".message.user .what")).to_have_text("What is a thread?")


def test_an_api_key_is_asked_for(browser: Browser) -> None:
    locked = StandIn({}, key="secret")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(locked.url)
        expect(page.locator("#model option")).to_have_text("an API key is needed")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        expect(page.locator("#model option")).to_have_count(2)
        page.select_option("#model", "llama-3.1-8b")
        say(page, "One.")
        assert locked.requests[-1]["model"] == "llama-3.1-8b"
        assert page.evaluate("JSON.stringify(localStorage)").find("secret") == -1
    finally:
        context.close()
        locked.stop()


def test_the_keyboard_reaches_everything(chat: Page, stand_in: StandIn) -> None:
    expect(chat.locator("#text")).to_be_focused()
    chat.keyboard.press("Control+/")
    expect(chat.locator("#help")).to_be_visible()
    assert chat.locator("#shortcuts dt").count() == chat.locator("#shortcuts dd").count() >= 10
    chat.keyboard.press("Escape")
    expect(chat.locator("#help")).to_be_hidden()
    say(chat, "One.")
    chat.keyboard.press("Alt+r")
    expect(chat.locator(".message.assistant .versions")).to_have_text("2 of 2")
    expect(chat.locator("#send")).to_be_visible()
    chat.keyboard.press("Alt+ArrowLeft")
    expect(chat.locator(".message.assistant .versions")).to_have_text("1 of 2")
    chat.keyboard.press("Control+m")
    chat.keyboard.press("ArrowUp")
    expect(chat.locator("[aria-label='Edit the message']")).to_be_focused()
    chat.keyboard.press("Escape")
    chat.keyboard.press("Control+,")
    expect(chat.locator("#system")).to_be_focused()
    ids = set()
    for _ in range(80):
        chat.keyboard.press("Tab")
        name, outline = chat.evaluate(FOCUSED)
        ids.add(name)
        assert outline != "none" or name in ("text", None), (
            name
        )  # around the box, its frame shows it; the body is a turn
    assert {"model", "text", "send", "search", "clear", "log", "temperature", "key", "Copy", "Answer again"} <= ids
    stand_in.held.clear()
    try:
        chat.fill("#text", "How do threads share work?")
        chat.press("#text", "Enter")
        expect(chat.locator(".message.live td")).to_have_count(9)
        chat.keyboard.press("Escape")
        expect(chat.locator(".message.assistant .facts").last).to_contain_text("stopped")
    finally:
        stand_in.held.set()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 390),
        ("dark", 1200),
        pytest.param("light", 1200, marks=pytest.mark.slow),
        pytest.param("dark", 390, marks=pytest.mark.slow),
    ],
)
def test_axe_finds_nothing_and_nothing_hangs_over(browser: Browser, stand_in: StandIn, scheme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(stand_in.url)
    expect(page.locator("#model option")).to_have_count(2)

    def judge(state: str) -> None:
        found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]})
        assert found.violations_count == 0, f"{state}: {found.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width, state

    judge("empty")
    say(page, "How do threads share work?")
    say(page, "Weather?")
    judge("answers")
    page.click("#open-settings")
    judge("settings")
    page.click("#close-settings")
    page.fill("#text", "Refuse.")
    page.press("#text", "Enter")
    expect(page.locator(".error[role=alert]")).to_be_visible()
    if width == 390:
        page.click("#open-sidebar")
    judge("sidebar and error")
    if width == 390:
        page.mouse.click(380, 400)  # beside the panel
        expect(page.locator("#sidebar")).to_be_hidden()
    else:
        page.click("#open-help")
        judge("help")
    context.close()
