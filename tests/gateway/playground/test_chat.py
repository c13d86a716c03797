# SPDX-License-Identifier: Apache-2.0
"""Chats in a real browser: streaming, settings, stopping, errors and keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.messages import RefusalCode
from tenant_kit import ALICE


def prompt_text(request: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(np.frombuffer(request.prompt, "<i4").tolist())


async def wait_for(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_answer_streams_and_the_next_question_contains_it(
    scripted: Any, live: Any, open_playground: Any, say: Any, tokenizer: Tokenizer
) -> None:
    engine = scripted()
    say(engine, "A mast is a **tall** pole.")
    engine.does.step_seconds = 0.02
    gateway = await live(engine, playground=True, alias=("mast",))
    user = await open_playground(f"{gateway.url}/")
    assert user.page.url == f"{gateway.url}/playground"
    await user.choose_model("mast")
    await user.page.get_by_label("System prompt").fill("Be brief.")
    await user.page.get_by_label("Temperature").fill("0.5")
    await user.page.get_by_label("Max. tokens").fill("64")
    await user.send("What is a mast?")
    await user.page.locator("article[aria-busy=true] .answer p").wait_for()  # text appears before the end
    assert await user.answer_text() == "A mast is a tall pole."
    assert await user.answer(0).locator("strong").inner_text() == "tall"
    stats = await user.answer(0).locator(".stats").inner_text()
    for stat in ("prompt tokens", f"{len(engine.does.reply)} answer tokens", "tokens/s", "first token after"):
        assert stat in stats
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 64)

    box = user.page.get_by_label("Message", exact=True)
    await box.fill("And")
    await box.press("Shift+Enter")
    await box.press_sequentially("a sail?")
    await box.press("Enter")
    await user.answer(1).wait_for()
    prompt = prompt_text(engine.requests[1], tokenizer)
    parts = ["Be brief.", "What is a mast?", "A mast is a **tall** pole.", "And\na sail?"]
    assert [part for part in parts if part in prompt] == parts
    assert await box.input_value() == ""


async def test_an_answer_can_be_stopped(scripted: Any, live: Any, open_playground: Any, say: Any) -> None:
    engine = scripted()
    say(engine, "word " * 200)
    engine.does.step_seconds = 0.02
    gateway = await live(engine, playground=True)
    user = await open_playground(f"{gateway.url}/playground")
    await user.choose_model()
    await user.send("Count")
    await user.page.locator("article[aria-busy=true] .answer p", has_text="word").wait_for()
    await user.page.get_by_role("button", name="Stop").click()
    assert "stopped" in (await user.answer(0).locator(".stats").inner_text()).split("\n")
    await wait_for(lambda: len(engine.aborts) == 1)  # the engine stops, too
    assert (await user.answer_text()).startswith("word")

    await user.send("Again")
    await user.page.locator("article[aria-busy=true] .answer p").wait_for()
    await user.page.keyboard.press("Escape")
    await user.answer(1).wait_for()
    await wait_for(lambda: len(engine.aborts) == 2)

    await user.send("And again")
    await user.page.locator("article[aria-busy=true] .answer p").wait_for()
    await user.page.get_by_role("button", name="New chat").click()
    await wait_for(lambda: len(engine.aborts) == 3)
    assert await user.page.locator("article").count() == 0
    assert await user.page.get_by_role("button", name="Send").is_visible()


async def test_a_key_is_asked_for_and_kept_out_of_sight(
    scripted: Any, live: Any, open_playground: Any, say: Any, keys: Path
) -> None:
    engine = scripted()
    say(engine, "Aye.")
    gateway = await live(engine, playground=True, api_keys_file=(str(keys),))
    user = await open_playground(f"{gateway.url}/playground")
    problem, field = user.page.locator("#models-problem"), user.page.get_by_label("API key")
    await problem.get_by_text("this gateway needs an API key").wait_for()
    assert await user.page.locator("option").count() == 0
    await field.fill("sk-wrong")
    await problem.get_by_text("this gateway does not know the API key").wait_for()
    await field.fill(ALICE)
    await user.choose_model()
    assert not await problem.is_visible()
    await user.send("Ahoy")
    assert await user.answer_text() == "Aye."

    await field.fill("sk-revoked")
    await user.send("Ahoy")
    failure = await user.answer(1).locator(".failure").inner_text()
    assert "this gateway does not know the API key" in failure
    assert "HTTP 401 · invalid_api_key" in failure
    assert not [url for url in user.log.urls if "sk-" in url]
    assert not await user.page.context.cookies()
    assert (await user.page.context.storage_state())["origins"] == []
    await user.page.reload()
    assert await field.input_value() == ""


async def test_errors_are_shown_in_the_words_of_the_api(
    scripted: Any, live: Any, open_playground: Any, say: Any, tokenizer: Tokenizer
) -> None:
    engine = scripted()
    say(engine, "Fair winds")
    gateway = await live(engine, playground=True, max_attempts=1, max_resumes=0)
    user = await open_playground(f"{gateway.url}/playground")
    await user.choose_model()
    engine.does.refuse = RefusalCode.INVALID
    await user.send("Ahoy")
    failure = user.answer(0).locator(".failure")
    assert "max_tokens is refused" in await failure.inner_text()
    engine.does.refuse = None
    engine.does.fault = "own"  # within the stream
    await user.page.get_by_role("button", name="Try again").click()
    await failure.get_by_text("a mask took 150 ms").wait_for()
    engine.does.fault = ""
    await user.page.get_by_role("button", name="Try again").click()
    await user.answer(0).get_by_text("Fair winds").wait_for()
    assert await failure.count() == 0
    assert await user.page.locator("article").count() == 2

    await gateway.stop()
    await user.send("Anyone there?")
    await user.answer(1).get_by_text("The gateway cannot be reached.").wait_for()


async def test_reasoning_is_apart_from_the_answer(
    scripted: Any, live: Any, open_playground: Any, say: Any
) -> None:
    engine = scripted()
    say(engine, "<think>Poles <b>are</b> tall.</think>A pole.")
    gateway = await live(engine, playground=True, reasoning_parser="qwen3")
    user = await open_playground(f"{gateway.url}/playground")
    await user.choose_model()
    await user.send("What is a mast?")
    assert await user.answer_text() == "A pole."
    reasoning = user.answer(0).locator("details")
    assert not await reasoning.locator("p").is_visible()
    await reasoning.locator("summary").click()
    assert await reasoning.locator("p").inner_text() == "Poles <b>are</b> tall."


async def test_the_page_works_on_a_phone_and_behind_a_path_prefix(
    scripted: Any, live: Any, open_playground: Any, say: Any
) -> None:
    engine = scripted()
    say(engine, "| a | b |\n|---|---|\n" + f"| {'wide' * 40} | {'x' * 90} |\n\n`{'long' * 60}`")
    gateway = await live(engine, playground=True)
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    user = await open_playground("about:blank", **phone)

    async def remove_prefix(route: Any) -> None:
        await route.continue_(url=route.request.url.replace("/llm/", "/"))

    await user.page.route("**/llm/**", remove_prefix)
    await user.open(f"{gateway.url}/llm/playground/")
    model = user.page.get_by_label("Model", exact=True)
    assert not await model.is_visible()
    await user.page.get_by_role("button", name="Settings").tap()
    await user.choose_model()
    await user.send("Show a table")
    await user.answer(0).wait_for()
    assert not await model.is_visible()  # the settings do not cover the conversation
    assert f"{gateway.url}/llm/v1/chat/completions" in user.log.urls
    for part in (user.answer(0), user.page.get_by_role("button", name="Send"), user.page.locator("header")):
        box = await part.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
