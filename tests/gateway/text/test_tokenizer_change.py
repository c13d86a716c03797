# SPDX-License-Identifier: Apache-2.0
"""Rollouts that change the tokenizer: an engine never gets a prompt from another model's tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.text.tokenizer import Tokenizer

TEXTS = [f"What is group {number} of the service? " * (1 + number) for number in range(8)]


def other_tokenizer_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of another tokenizer of the same kind, with other ids for all ordinary tokens."""
    model = json.loads(files["tokenizer.json"])
    size = max(model["model"]["vocab"].values()) + 1

    def moved(number: int) -> int:
        return number if number < 5 or number >= size else 5 + (number - 5 + 17) % (size - 5)

    model["model"]["vocab"] = {token: moved(number) for token, number in model["model"]["vocab"].items()}
    return {**files, "tokenizer.json": json.dumps(model).encode()}


def received_requests(engine: Any) -> set[bytes]:
    return {request.prompt for request in engine.requests}


def expected_prompt(files: dict[str, bytes]) -> set[bytes]:
    tokenizer = Tokenizer.from_files(files)
    return {b"".join(token.to_bytes(4, "little") for token in tokenizer.encode(text)) for text in TEXTS}


async def ask(client: openai.AsyncOpenAI, text: str) -> str:
    answer = await client.completions.create(model="demo", prompt=text, max_tokens=4)
    return answer.choices[0].finish_reason


@pytest.fixture
def two_engines(scripted: Callable[..., Any], tokenizer_files: dict[str, bytes]) -> tuple[Any, Any]:
    changed = other_tokenizer_files(tokenizer_files)
    assert not expected_prompt(changed) & expected_prompt(tokenizer_files), "every text has other tokens"
    return scripted(revision="old"), scripted(changed, revision="new")


async def test_requests_move_to_the_new_tokenizer_with_its_engines(
    live: Any, two_engines: tuple[Any, Any], until: Any, tokenizer_files: dict[str, bytes]
) -> None:
    old, new = two_engines
    first = DiscoveredEngine(name="old", uid="1", endpoint=old.endpoint, revision="old")
    second = DiscoveredEngine(name="new", uid="2", endpoint=new.endpoint, revision="new")
    gateway = await live(old, wait=False)
    table, client = gateway.gateway.only_service.table, gateway.client(timeout=60)
    table.sync([first])
    await until(lambda: table.serving)
    reasons = [await ask(client, text) for text in TEXTS]
    table.sync([first, second])
    tasks = [asyncio.create_task(ask(client, text)) for text in TEXTS * 4]
    await until(lambda: sum(engine.serving for engine in table) == 2)
    reasons += [await ask(client, text) for text in TEXTS * 4]
    table.sync([second])
    await until(lambda: len(table) == 1)
    reasons += [await ask(client, text) for text in TEXTS]
    reasons += await asyncio.gather(*tasks)
    assert set(reasons) == {"length"}
    assert received_requests(old) == expected_prompt(tokenizer_files)
    assert received_requests(new) == expected_prompt(other_tokenizer_files(tokenizer_files))


async def test_engine_sends_its_folder_of_templates(
    live: Any, scripted: Callable[..., Any], tokenizer_files: dict[str, bytes]
) -> None:
    engine = scripted({**tokenizer_files, "additional_chat_templates/tool_use.jinja": b"<tool_call>{}"})
    client = (await live(engine)).client(timeout=60)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    question = {"role": "user", "content": "Look!"}
    await client.chat.completions.create(model="demo", messages=[question], tools=[tool], max_tokens=4)
    ids = Tokenizer.from_files(tokenizer_files).encode("<tool_call>{}", add_special_tokens=False)
    assert received_requests(engine) == {b"".join(token.to_bytes(4, "little") for token in ids)}


async def test_waiting_requests_are_tokenized_for_the_engine_that_joins(
    live: Any, two_engines: tuple[Any, Any], until: Any, tokenizer_files: dict[str, bytes]
) -> None:
    """The only engine leaves while requests that were tokenized for it are waiting."""
    old, new = two_engines
    first = DiscoveredEngine(name="old", uid="1", endpoint=old.endpoint)
    gateway = await live(old, wait=False, queue_timeout_seconds=60.0, resume_wait_seconds=60.0)
    table, client = gateway.gateway.only_service.table, gateway.client(timeout=60)
    table.sync([first])
    await until(lambda: table.serving)
    old.does.draining = True
    await until(lambda: not table.serving)
    tasks = [asyncio.create_task(ask(client, text)) for text in TEXTS]
    await until(lambda: gateway.gateway.only_service.waiting_requests == len(TEXTS))
    table.sync([DiscoveredEngine(name="new", uid="2", endpoint=new.endpoint)])
    assert set(await asyncio.gather(*tasks)) == {"length"}
    assert (received_requests(old), received_requests(new)) == (
        set(),
        expected_prompt(other_tokenizer_files(tokenizer_files)),
    )


async def test_started_answer_is_not_continued_by_another_revision(
    live: Any, two_engines: tuple[Any, Any], until: Any
) -> None:
    old, new = two_engines
    old.does.reply = list(range(10, 40))
    old.does.fault, old.does.cuts = "mute", (3,)
    first = DiscoveredEngine(name="old", uid="1", endpoint=old.endpoint)
    second = DiscoveredEngine(name="new", uid="2", endpoint=new.endpoint)
    gateway = await live(old, wait=False, resume_wait_seconds=0.1, resume_timeout_seconds=0.5)
    table, client = gateway.gateway.only_service.table, gateway.client(timeout=60)
    table.sync([first])
    await until(lambda: table.serving)
    stream = await client.completions.create(model="demo", prompt=TEXTS[0], max_tokens=30, stream=True)
    await anext(stream)
    table.sync([first, second])
    await until(lambda: sum(engine.serving for engine in table) == 2)
    old.kill()
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    assert not new.requests
