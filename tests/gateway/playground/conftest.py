# SPDX-License-Identifier: Apache-2.0
"""A browser with the playground of a gateway whose engine is scripted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from browser import PageLog, launch_chromium
from mizzen.gateway.text.tokenizer import Tokenizer


class Playground:
    """The page in a browser, and what its user does and sees."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.log = PageLog(page)

    async def open(self, url: str) -> None:
        await self.page.goto(url)

    async def choose_model(self, name: str = "demo") -> None:
        """Choose a model; waits until the list has it."""
        await self.page.get_by_label("Model", exact=True).select_option(name)

    async def send(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).fill(text)
        await self.page.get_by_role("button", name="Send").click()

    def answer(self, number: int) -> Any:
        """Return the element of an answer, from 0, once it has ended."""
        return self.page.locator("article.assistant[aria-busy=false]").nth(number)

    async def answer_text(self, number: int = 0) -> str:
        return await self.answer(number).locator(".answer").inner_text()

    async def show(self, pieces: list[str]) -> str:
        """Answer the next message with these pieces of text; return the HTML of the answer."""
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

        async def fulfill(route: Any) -> None:
            await route.fulfill(status=200, content_type="text/event-stream", body=body)

        await self.page.route("**/v1/chat/completions", fulfill)
        await self.page.get_by_role("button", name="New chat").click()
        await self.send("show")
        html = await self.answer(0).locator(".answer").inner_html()
        await self.page.unroute("**/v1/chat/completions")
        return html


@pytest.fixture
async def open_playground() -> AsyncIterator[Callable[..., Awaitable[Playground]]]:
    """Return a function that opens a page; afterwards, no page may have violated its content policy."""
    pages: list[Playground] = []
    async with contextlib.AsyncExitStack() as stack:
        browser = await stack.enter_async_context(launch_chromium())

        async def open_page(url: str, **context: Any) -> Playground:
            own = await browser.new_context(**context)
            own.set_default_timeout(60_000)
            pages.append(Playground(await own.new_page()))
            await pages[-1].open(url)
            return pages[-1]

        yield open_page
        assert [problem for page in pages for problem in page.log.problems] == []


@pytest.fixture
def say(tokenizer: Tokenizer) -> Callable[[Any, str], None]:
    """Return a function that makes a scripted engine answer with a text."""

    def reply(engine: Any, text: str) -> None:
        engine.does.end = tokenizer.token_id("</s>")
        engine.does.reply = [*tokenizer.encode(text, add_special_tokens=False), engine.does.end]

    return reply
