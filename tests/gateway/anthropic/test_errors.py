# SPDX-License-Identifier: Apache-2.0
"""Errors of the Messages API have Anthropic's shape; keys, limits, deadlines and cancels apply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tenant_kit import ALICE, BOB, key_file

USER: Any = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "demo", "messages": [USER], "max_tokens": 20}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "input_schema": CITY}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}

Model = Callable[..., Any]
Client = Callable[..., anthropic.AsyncAnthropic]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages must hold"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    (user({"type": "image", "source": {}}), "messages[0].content[0].source"),
    (user({"type": "text", "text": "a"}, {"type": "document"}), "messages[0].content[1].type is 'document'"),
    (user({"type": "thinking", "thinking": "a"}), "messages[0].content[0].type is 'thinking'"),
    (user({"type": "server_tool_use"}), "messages[0].content[0].type is 'server_tool_use'"),
    (user({"text": "a"}), "messages[0].content[0].type is required"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "tool_result", "tool_use_id": "t9"}), "messages[0].content[0].tool_use_id"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages[1]"),
    ({"messages": [USER, {"role": "assistant", "content": []}]}, "messages[1]"),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USE]},
                *user({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]})[
                    "messages"
                ],
            ]
        },
        "messages[2].content[0].content[0].source",
    ),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name"),
    ({"tools": [{"type": "web_search_20250305"}, TOOL, TOOL]}, "tools[2].name"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "news"}}, "tool_choice.name is 'news'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice demands a call"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences holds 17"),
    ({"temperature": 3}, "temperature"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"container": "c1"}, "container is not supported"),
    ({"response_format": {"type": "json_object"}}, "use output_config.format"),
    ({"stop": ["a"]}, "use stop_sequences"),
]


async def test_invalid_requests_get_400_and_name_the_field(live: Any, model: Model) -> None:
    gateway = await live(model("Yes."))
    async with httpx.AsyncClient(timeout=60) as http:
        for fields, text in INVALID:
            sent = {name: value for name, value in {**BODY, **fields}.items() if value is not None}
            answer = await http.post(f"{gateway.url}/v1/messages", json=sent)
            assert answer.status_code == 400, (fields, answer.text)
            body = answer.json()
            assert set(body) == {"type", "error", "request_id"}
            assert set(body["error"]) == {"type", "message"}
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert text in body["error"]["message"], fields
            assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_strict_fields_refuse_what_is_otherwise_ignored(live: Any, model: Model) -> None:
    gateway = await live(model("Yes."), strict_fields=True)
    search = {"type": "web_search_20250305", "name": "web_search"}
    for fields, status in (
        ({}, 200),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 200),
        (user({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}), 200),
        ({"tools": [search]}, 400),
        ({"speed": "fast"}, 400),
        ({"made_up": 1}, 400),
        (user({"type": "text", "text": "a", "made_up": 1}), 400),
    ):
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{gateway.url}/v1/messages", json={**BODY, **fields})
        assert answer.status_code == status, (fields, answer.text)


async def test_other_errors_have_anthropics_types(live: Any, model: Model, client: Client) -> None:
    gateway = await live(model("Yes."), max_body_bytes=2000)
    connected = client(gateway)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await connected.messages.create(**{**BODY, "model": "other"})
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert unknown.value.request_id
    async with httpx.AsyncClient(timeout=60) as http:
        for method, path, content, status, kind in (
            ("POST", "/v1/messages", "{", 400, "invalid_request_error"),
            ("POST", "/v1/messages", " " * 3000, 413, "request_too_large"),
            ("GET", "/v1/messages", "", 405, "invalid_request_error"),
            ("POST", "/v1/messages/batches", "{}", 404, "not_found_error"),
        ):
            answer = await http.request(method, f"{gateway.url}{path}", content=content)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), path
        answer = await http.post(f"{gateway.url}/v1/chat/completions", content="{")
        assert "param" in answer.json()["error"]  # other paths keep OpenAI's shape


async def test_without_an_engine_the_api_is_overloaded(live: Any) -> None:
    gateway = await live("tcp://127.0.0.1:9", wait=False, queue_timeout_seconds=0.01)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/messages", json=BODY)
        metrics = (await http.get(f"{gateway.admin}/metrics")).text
    assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert 'code="529"' in metrics


async def test_keys_are_read_from_both_headers(live: Any, model: Model, client: Client, keys: Path) -> None:
    gateway = await live(model("Yes."), api_keys_file=(str(keys),))
    message = await client(gateway, ALICE).messages.create(**BODY)
    assert message.stop_reason == "end_turn"
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await client(gateway, "sk-wrong").messages.create(**BODY)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    bearer = anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=BOB, max_retries=0)
    assert (await bearer.messages.count_tokens(model="demo", messages=[USER])).input_tokens
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.url}/v1/messages"
        for headers, status in (
            ({}, 401),
            ({"x-api-key": ALICE}, 200),
            ({"authorization": f"Bearer {ALICE}", "x-api-key": "sk-wrong"}, 200),
            ({"authorization": "Bearer sk-wrong", "x-api-key": ALICE}, 401),
            ({"authorization": "Basic abc", "x-api-key": ALICE}, 200),
        ):
            assert (await http.post(url, json=BODY, headers=headers)).status_code == status, headers
        chat = await http.get(f"{gateway.url}/v1/models", headers={"x-api-key": ALICE})
        assert chat.status_code == 200


async def test_rate_limits_apply(live: Any, model: Model, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "requestsPerMinute": 2}))
    connected = client(await live(model("Yes."), api_keys_file=(str(path),)), ALICE)
    await connected.messages.create(**BODY)
    await connected.messages.count_tokens(model="demo", messages=[USER])
    with pytest.raises(anthropic.RateLimitError) as refused:
        await connected.messages.create(**BODY)
    assert refused.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    assert refused.value.response.headers["retry-after"]


async def test_deadline_applies(live: Any, model: Model) -> None:
    gateway = await live(model("Yes. " * 50, step_seconds=0.5))
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"x-request-timeout": "0.2"}
        answer = await http.post(f"{gateway.url}/v1/messages", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


async def test_disconnect_aborts_in_the_engine(live: Any, model: Model, client: Client, until: Any) -> None:
    engine = model("Yes. " * 200, step_seconds=0.02)
    gateway = await live(engine)
    stream = await client(gateway).messages.create(**{**BODY, "max_tokens": 1000}, stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await until(lambda: engine.aborts and not engine.running)
    assert engine.aborts == [engine.requests[0].rid]


async def test_a_failed_stream_ends_with_an_error_event(live: Any, model: Model, client: Client) -> None:
    engine = model("Yes. " * 20, fault="own", fault_after=5)
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/messages", json={**BODY, "stream": True})
    assert answer.status_code == 200
    name, data = answer.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == answer.headers["request-id"]
    with pytest.raises(anthropic.APIStatusError):
        async for _ in await client(gateway).messages.create(**BODY, stream=True):
            pass
