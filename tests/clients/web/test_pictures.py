"""The pictures of docs/chat_page.md. To write them:

pytest tests/clients/web/test_pictures.py --screenshots docs/images
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.clients.web.said import ANSWERS, say
from tests.clients.web.stand_in import StandIn

pytestmark = pytest.mark.xdist_group("web")  # a browser for all

PICTURES = {
    "chat-light": ("light", 1200, 860),
    "chat-dark": ("dark", 1200, 860),
    "chat-phone": ("light", 390, 844),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_page_as_the_documentation_shows_it(
    browser: Browser, request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    folder: Path = request.config.getoption("--screenshots") or tmp_path
    scheme, width, height = PICTURES[name]
    running = StandIn(ANSWERS)
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        has_touch=width < 500,
        is_mobile=width < 500,
    )
    try:
        page = context.new_page()
        page.goto(running.url)
        expect(page.locator("#model option")).to_have_count(2)
        for earlier in ("Names for a sea nymph", "What does a list hold?", "A regular expression for dates"):
            say(page, earlier)
            page.keyboard.press("Control+Shift+O")
        say(page, "How do threads share work?")
        page.locator("#log").evaluate("log => log.scrollTop = 0")
        page.mouse.move(0, height - 1)
        page.screenshot(path=folder / f"{name}.png")
    finally:
        context.close()
        running.stop()
    assert 10_000 < (folder / f"{name}.png").stat().st_size < 150_000
