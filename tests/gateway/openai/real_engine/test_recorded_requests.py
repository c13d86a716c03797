# SPDX-License-Identifier: Apache-2.0
"""Requests of clients that these tests do not install, against a gateway with the demo model.

A file of `recorded_requests` has requests that one client, in its version `client`, sent to a server that
answers the first request of a conversation with a tool call. Texts are shortened; headers of the connection
are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mizzen.gateway.routing.session import get_session

pytestmark = pytest.mark.xdist_group("demo-engine")

RECORDS = {
    path.stem: json.loads(path.read_text())["requests"]
    for path in sorted((Path(__file__).parent / "recorded_requests").glob("*.json"))
}
IGNORED = {
    "aiperf": "",
    "codex": "client_metadata, tools[].description, tools[web_search]",
    "instructor": "",
    "litellm": "messages[].cache_control, messages[].content[].cache_control, "
    "messages[].content[].prompt_cache_breakpoint, tools[].cache_control",
    "llamaindex": "",
    "opencode": "",
    "outlines": "",
}
"""The fields of each client that the gateway ignores."""


@pytest.fixture
async def http(live_demo: Callable[..., Any]) -> AsyncIterator[httpx.AsyncClient]:
    gateway = await live_demo(tool_parser="hermes")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        yield client


async def send(http: httpx.AsyncClient, request: dict[str, Any], **changes: Any) -> httpx.Response:
    body = {**request["body"], "model": "demo", **changes}
    answer = await http.post(request["path"], headers=request["headers"], json=body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    return answer


def read_events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("client", RECORDS)
async def test_requests_of_clients_are_served(http: httpx.AsyncClient, client: str) -> None:
    ignored: set[str] = set()
    for request in RECORDS[client]:
        limit = "max_output_tokens" if request["path"] == "/v1/responses" else "max_tokens"
        answer = await send(http, request, **{limit: 8})
        ignored.update(answer.headers.get("x-mizzen-ignored", "").split(", "))
    assert ignored - {""} == set(IGNORED[client].split(", ")) - {""}


async def test_codex_can_be_made_to_call_a_function_of_a_namespace(http: httpx.AsyncClient) -> None:
    choice = {"type": "function", "name": "close_agent"}
    (request,) = RECORDS["codex"]
    events = read_events(await send(http, request, tool_choice=choice, max_output_tokens=200))
    items = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["type"], item["namespace"], item["name"]) for item in items] == [
        ("function_call", "multi_agent_v1", "close_agent")
    ]


@pytest.mark.parametrize("client", ["llamaindex", "instructor"])
async def test_the_first_entry_of_each_chunk_makes_a_whole_call(http: httpx.AsyncClient, client: str) -> None:
    """LlamaIndex and instructor's partial answers read `tool_calls[0]` of a chunk only."""
    request = RECORDS[client][0]
    (tool,) = request["body"]["tools"]
    choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
    changes = {"tool_choice": choice, "max_tokens": 400, "temperature": 0}
    whole = (await send(http, request, **changes, stream=False)).json()["choices"][0]["message"]
    events = read_events(await send(http, request, **changes))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    entries = [delta["tool_calls"][0]["function"] for delta in deltas if delta.get("tool_calls")]
    call = {key: "".join(entry.get(key) or "" for entry in entries) for key in ("name", "arguments")}
    assert call == whole["tool_calls"][0]["function"]
    assert isinstance(json.loads(call["arguments"]), dict)


async def test_outlines_gets_exactly_the_constraint(http: httpx.AsyncClient) -> None:
    for request in RECORDS["outlines"]:
        answer = (await send(http, request, temperature=1)).json()
        pattern = request["body"]["structured_outputs"]["regex"]
        assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("client", ["opencode", "aiperf"])
def test_clients_name_their_session(client: str) -> None:
    for request in RECORDS[client]:
        headers = [(name.encode(), value.encode()) for name, value in request["headers"].items()]
        assert get_session(headers, "body") == request["headers"]["x-session-affinity"]
