# SPDX-License-Identifier: Apache-2.0
"""Tools, options and items as agents such as Codex send them to the Responses API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.responses.parse import ResponsesParser, rename_field

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": CITY, "strict": False, **fields}


def namespace(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": f"Tools of {name}.", "tools": list(tools)}


CODEX: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "tools": [
        function("shell"),
        namespace("mcp__maps__", function("weather", defer_loading=True), function("route")),
        namespace("mcp__news__", function("route")),
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "detailed"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session",
    "text": {"verbosity": "low"},
    "client_metadata": {"origin": "cli"},
}
IGNORED = {
    "client_metadata", "reasoning.summary", "text.verbosity", "tools[].description",
    "tools[].tools[].defer_loading", "tools[web_search]", "tools[image_generation]",
}  # fmt: skip


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>'


def request_prompt(engine: Any) -> str:
    ids = np.frombuffer(engine.requests[-1].prompt, "<i4").tolist()
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


async def post(gateway: Any, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{gateway.url}/v1/responses", json=body)


@pytest.mark.parametrize(
    ("shown", "name", "space"),
    [
        ("shell", "shell", None),
        ("weather", "weather", "mcp__maps__"),
        ("mcp__maps__route", "route", "mcp__maps__"),
        ("mcp__news__route", "route", "mcp__news__"),
    ],
)
async def test_functions_of_namespaces_are_called(
    live: Any, model: Callable[..., Any], shown: str, name: str, space: str | None
) -> None:
    engine = model(call(shown))
    gateway = await live(engine)
    answer = await post(gateway, CODEX)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-mizzen-ignored"].split(", ")) == IGNORED
    prompt = request_prompt(engine)
    for known in ("shell", "weather", "mcp__maps__route", "mcp__news__route"):
        assert f'"name": "{known}"' in prompt
    assert "web_search" not in prompt
    item = answer.json()["output"][-1]
    assert (item["type"], item["name"], item.get("namespace")) == ("function_call", name, space)
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function", "namespace", "namespace"]

    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny", "x": 1}
    second = {**CODEX, "stream": True, "input": [*CODEX["input"], {**item, "internal": 1}, output]}
    answer = await post(gateway, second)
    assert answer.status_code == 200, answer.text
    assert {"input[].internal", "input[].x"} < set(answer.headers["x-mizzen-ignored"].split(", "))
    assert call(shown) in request_prompt(engine)
    assert answer.text.count('"type":"response.completed"') == 1
    if space is not None:
        assert f'"namespace":"{space}"' in answer.text


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}},
        "tool_choice.tools",
    ),
    ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_serach"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": 3}]}, "tools[0].type"),
    ({"tools": [namespace("a", namespace("b"))]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "web_search"}, namespace("a", {"type": "custom"})]}, "tools[1].tools[0].type"),
    ({"tools": [namespace("a", function("f"), function("f"))]}, "tools[0].tools[1].name"),
    ({"tools": [namespace("a", function("f", parameters={"type": 1}))]}, "tools[0].tools[0].parameters.type"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": 3}]}, "tools[1].name"),
    ({"tools": [function(f"f{index}") for index in range(129)]}, "tools"),
    ({"input": [{"role": "user", "content": "a", "x": 1, "id": 5}]}, "input[0].id"),
    ({"include": ["made_up"]}, "include[0]"),
]


async def test_tools_that_a_client_would_miss_are_refused(live: Any, model: Callable[..., Any]) -> None:
    gateway = await live(model("Yes."))
    for change, param in ERRORS:
        answer = await post(gateway, {**CODEX, **change})
        assert answer.status_code == 400, (change, answer.text)
        assert answer.json()["error"]["param"] == param, (change, answer.text)


def test_error_about_a_tool_of_the_chat_request_names_the_function_of_a_namespace() -> None:
    """Other tools come before the function, so its position differs from that in the chat request."""
    tools = [{"type": "web_search"}, namespace("a", function("f"), function("g"))]
    parsed = ResponsesParser(RequestParser().chat_generation).parse(
        json.dumps({**CODEX, "tools": tools}).encode()
    )
    error = invalid("tools[1].function.parameters.x is wrong", "tools[1].function.parameters.x")
    rename_field(error, parsed.tools)
    assert error.param == "tools[1].tools[1].parameters.x"
    assert error.message == "tools[1].tools[1].parameters.x is wrong"


async def test_choice_among_allowed_tools_leaves_out_hosted_ones(
    live: Any, model: Callable[..., Any]
) -> None:
    allowed = [{"type": "function", "name": "weather"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    answer = await post(await live(model("Yes.")), {**CODEX, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tool_choice"] == choice
