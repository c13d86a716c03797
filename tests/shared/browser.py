# SPDX-License-Identifier: Apache-2.0
"""Starts Chromium for tests of web pages; the tests are skipped if it or Playwright is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "MIZZEN_CHROMIUM"
"""Environment variable: if it is `required`, tests fail instead of being skipped without a browser."""
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def find_chromium() -> str:
    """Return the path of a Chromium browser; skip the test if no browser is found."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        _skip("the package playwright is missing")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    return path or _skip(f"no browser is on the path: one of {', '.join(NAMES)}")


def _skip(reason: str) -> str:
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(f"{reason}, and {REQUIRED} is set")
    pytest.skip(reason)


@asynccontextmanager
async def launch_chromium() -> AsyncIterator[Browser]:
    """Start a headless browser, and stop it in the end."""
    path = find_chromium()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()


class PageLog:
    """What a page did that a user does not see.

    Attributes:
        problems: messages about violations of the content policy, errors of scripts, and dialogs.
        urls: URLs of all requests.
    """

    def __init__(self, page: Page) -> None:
        self.problems: list[str] = []
        self.urls: list[str] = []
        page.on("console", lambda message: self._add_message(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _add_message(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.problems.append(text)
