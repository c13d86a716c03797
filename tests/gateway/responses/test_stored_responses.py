# SPDX-License-Identifier: Apache-2.0
"""Stored responses with the official OpenAI client: conversations by id, retrieval, deletion, isolation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from mizzen.gateway.config import GatewayConfig
from tenant_kit import ALICE, BOB, key_file

ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nü?\n</think>\n\nLet me see.\n{CALL}"
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]

Model = Callable[..., Any]


def request_prompt(engine: Any) -> str:
    ids = np.frombuffer(engine.requests[-1].prompt, "<i4").tolist()
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


def reply(engine: Any, text: str) -> None:
    """Make the engine answer with a text."""
    engine.does.reply = [*engine.tokenizer.encode(text, add_special_tokens=False), engine.does.end]


@pytest.mark.parametrize("stream", [False, True])
async def test_previous_response_precedes_the_input(live: Any, model: Model, stream: bool) -> None:
    """The prompt equals that of a client that sends all items; a loop with a tool call is continued."""
    engine = model(ANSWER)
    gateway = await live(engine, response_store_seconds=60)
    client = gateway.client().responses

    async def ask(**options: Any) -> Any:
        if not stream:
            return await client.create(model="demo", tools=TOOLS, **options)
        events = [
            event async for event in await client.create(model="demo", tools=TOOLS, stream=True, **options)
        ]
        assert events[0].response.previous_response_id == options.get("previous_response_id")
        return events[-1].response

    first = await ask(input="Weather?", instructions="Be brief.")
    assert first.store is True
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    reply(engine, "Rain.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12 °C"}
    second = await ask(input=[output], previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("Rain.", first.id)
    continued = request_prompt(engine)
    third = await ask(input="And now?", previous_response_id=second.id)
    prompt = request_prompt(engine)
    assert third.previous_response_id == second.id
    history = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        output,
    ]
    await ask(input=history, store=False)
    assert request_prompt(engine) == continued
    more = [
        *(item.model_dump(exclude_none=True) for item in second.output),
        {"role": "user", "content": "And now?"},
    ]
    await ask(input=[*history, *more], store=False)
    assert request_prompt(engine) == prompt
    assert "Be brief." not in prompt


async def test_items_may_be_references(live: Any, model: Model) -> None:
    """The Vercel AI SDK refers to earlier output items by their ids, and sends the other items."""
    engine = model(ANSWER)
    gateway = await live(engine, response_store_seconds=60)
    client = gateway.client().responses
    first = await client.create(model="demo", tools=TOOLS, input="Weather?")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12 °C"}
    user = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    prompts = []
    for items in (
        [{"type": "item_reference", "id": item.id} for item in first.output],
        [{"id": item.id} for item in first.output],
        [item.model_dump(exclude_none=True) for item in first.output],
    ):
        await client.create(model="demo", tools=TOOLS, input=[user, *items, output])
        prompts.append(request_prompt(engine))
    assert len(set(prompts)) == 1
    with pytest.raises(openai.NotFoundError, match=r"input\[1\]: there is no stored item 'msg_x'") as missing:
        await client.create(model="demo", input=[user, {"type": "item_reference", "id": "msg_x"}])
    assert (missing.value.code, missing.value.param) == ("item_not_found", "input[1].id")


async def test_responses_are_retrieved_and_deleted(live: Any, model: Model) -> None:
    engine = model("Yes.")
    gateway = await live(engine, response_store_seconds=60, cors_origin=("https://pages.example",))
    client = gateway.client().responses
    created = await client.create(model="demo", input="Hi", metadata={"a": "b"})
    later = await client.create(model="demo", input="So?", previous_response_id=created.id)
    assert await client.retrieve(created.id) == created
    events = [event async for event in await client.create(model="demo", input="Hi", stream=True)]
    assert await client.retrieve(events[-1].response.id) == events[-1].response
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        await client.retrieve(created.id, stream=True)
    await client.delete(created.id)
    async with httpx.AsyncClient() as http:
        url = f"{gateway.url}/v1/responses/{later.id}"
        preflight = {"origin": "https://pages.example", "access-control-request-method": "DELETE"}
        assert (await http.options(url, headers=preflight)).status_code == 200
    for call in (client.retrieve, client.delete):
        with pytest.raises(openai.NotFoundError, match="there is no stored response") as missing:
            await call(created.id)
        assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError, match="previous_response_id: there is no stored") as missing:
        await client.create(model="demo", input="Hi", previous_response_id=created.id)
    assert (missing.value.code, missing.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    await client.create(model="demo", input="And?", previous_response_id=later.id)
    assert "Hi" in request_prompt(engine), "later responses keep the turns of a deleted one"
    unstored = await client.create(model="demo", input="Hi", store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        await client.retrieve(unstored.id)


async def test_each_key_has_its_own_responses(live: Any, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE}, {"name": "b", "key": BOB}))
    gateway = await live(model("Yes."), api_keys_file=(str(path),), response_store_seconds=60)
    alice, bob = gateway.client(ALICE).responses, gateway.client(BOB).responses
    created = await alice.create(model="demo", input="Hi")
    reference: Any = {"type": "item_reference", "id": created.output[0].id}
    for call in (
        lambda client: client.retrieve(created.id),
        lambda client: client.create(model="demo", input="Hi", previous_response_id=created.id),
        lambda client: client.create(model="demo", input=[reference]),
        lambda client: client.delete(created.id),
    ):
        with pytest.raises(openai.APIStatusError, match="there is no stored"):
            await call(bob)
        await call(alice)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{gateway.url}/v1/responses/{created.id}")).status_code == 401


async def test_errors_name_the_items_of_the_request(live: Any, model: Model) -> None:
    """Indices do not count the items of earlier turns."""
    gateway = await live(model("Yes."), response_store_seconds=60, max_body_bytes=2500)
    client = gateway.client().responses
    created = await client.create(model="demo", input="Hi")
    bad: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_image"}]},
    ]
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.create(model="demo", input=bad, previous_response_id=created.id)
    assert wrong.value.param == "input[1].content[0]"
    assert "input[1].content[0]: image_url must be a string" in str(wrong.value)
    for field, value in {"store": "yes", "previous_response_id": 3}.items():
        with pytest.raises(openai.BadRequestError, match=f"{field} must be a") as wrong:
            await client.create(model="demo", input="Hi", extra_body={field: value})
        assert wrong.value.param == field
    for changed in ({"input": 3}, {"input": [3]}, {"input": None}):
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.create(model="demo", input="Hi", extra_body=changed)
        assert (wrong.value.param or "").startswith("input")
    created = await client.create(model="demo", input="x" * 1500)
    with pytest.raises(openai.APIStatusError, match="--max-body-bytes") as wrong:
        await client.create(model="demo", input="x" * 1500, previous_response_id=created.id)
    assert wrong.value.status_code == 413


async def test_without_a_store_errors_name_the_way_out(live: Any, model: Model) -> None:
    gateway = await live(model("Yes."))
    client = gateway.client().responses
    created = await client.create(model="demo", input="Hi")
    assert created.store is False
    for options in (
        {"previous_response_id": created.id},
        {"input": [{"type": "item_reference", "id": created.output[0].id}]},
    ):
        with pytest.raises(openai.BadRequestError, match="set `store: false`"):
            await client.create(**{"model": "demo", "input": "Hi", **options})
    for call in (client.retrieve, client.delete):
        with pytest.raises(openai.NotFoundError, match="--response-store-seconds"):
            await call(created.id)


async def test_responses_expire_after_their_last_use(live: Any, model: Model, until: Any) -> None:
    gateway = await live(model("Yes."), response_store_seconds=0.5)
    client = gateway.client().responses
    created = await client.create(model="demo", input="Hi")
    for _ in range(4):
        await asyncio.sleep(0.2)
        await client.retrieve(created.id)
    await until(lambda: gateway.gateway.response_store.count == 0)
    assert gateway.gateway.response_store.bytes == 0
    with pytest.raises(openai.NotFoundError, match=r"kept for 0\.5 s"):
        await client.retrieve(created.id)


async def test_failed_and_aborted_streams_are_not_stored(live: Any, model: Model, until: Any) -> None:
    engine = model("Yes. " * 50, fault="own")
    gateway = await live(engine, response_store_seconds=60)
    events = [
        json.loads(event.model_dump_json())
        async for event in await gateway.client().responses.create(model="demo", input="Hi", stream=True)
    ]
    assert events[-1]["type"] == "response.failed"
    with pytest.raises(openai.NotFoundError):
        await gateway.client().responses.retrieve(events[0]["response"]["id"])
    assert gateway.gateway.response_store.count == 0
    await until(lambda: gateway.gateway.body_budget.used == 0)


def test_store_needs_a_single_process() -> None:
    with pytest.raises(ValueError, match="--response-store-seconds needs --processes 1"):
        GatewayConfig(served_name="m", processes=2, response_store_seconds=60)
