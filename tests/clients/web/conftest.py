"""Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.clients.web.said import ANSWERS
from tests.clients.web.stand_in import StandIn

CHROMIUM = shutil.which("chromium")
# Root's browser has no sandbox of its own, and a closed network must not be asked for updates.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container's /dev/shm is small, and the server wants it
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="folder to write the pictures of the documentation to")


@pytest.fixture(scope="module")  # as long as Playwright runs, no other test of this process may run an event loop
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium, as root): the page was not opened")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page that fails the test when a script fails or the console shows an error."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield opened
    context.close()
    assert not problems, problems


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    running = StandIn(ANSWERS)
    yield running
    running.stop()


@pytest.fixture
def chat(page: Page, stand_in: StandIn) -> Page:
    stand_in.requests.clear()
    page.goto(stand_in.url)
    expect(page.locator("#model option")).to_have_count(2)
    return page
