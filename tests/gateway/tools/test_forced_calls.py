# SPDX-License-Identifier: Apache-2.0
"""Forced tool calls of the demo model, which has no tool format; the engine enforces them by grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

pytestmark = pytest.mark.xdist_group("demo-engine")

USER: list[Any] = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bonn", "Köln"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}


@pytest.fixture
async def gateway(live_demo: Callable[..., Any]) -> Any:
    return await live_demo()


@pytest.fixture
def client(gateway: Any) -> openai.AsyncOpenAI:
    return gateway.client().with_options(timeout=120)


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS if name == "weather" else {"maxProperties": 0})


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_required_tool_is_called(client: Any, temperature: float) -> None:
    answer = await client.chat.completions.create(
        model="demo",
        messages=USER,
        tools=[WEATHER, TIME],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=5,
        n=3,
        max_tokens=200,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert len(calls) == 1
        check(calls)


async def test_named_tool_is_called_in_a_stream(client: Any) -> None:
    stream = await client.chat.completions.create(
        model="demo",
        messages=USER,
        tools=[WEATHER, TIME],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=200,
        stream=True,
    )
    name, arguments, reasons = "", "", []
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        assert not chunk.choices[0].delta.content
        reasons.append(chunk.choices[0].finish_reason)
    assert (name, reasons[-1]) == ("weather", "tool_calls")
    check([(name, arguments)])


async def test_responses_api_forces_a_call_and_accepts_its_output(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    items: list[Any] = [*USER]
    options: dict[str, Any] = {"model": "demo", "tools": [tool], "tool_choice": "required"}
    response = await client.responses.create(input=items, max_output_tokens=300, **options)
    calls = [item for item in response.output if item.type == "function_call"]
    check([(call.name, call.arguments) for call in calls])
    assert len(calls) == len(response.output)


async def test_responses_api_enforces_the_text_format(client: Any) -> None:
    form = {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}
    response = await client.responses.create(model="demo", input="Hi", text={"format": form}, temperature=1.3)
    jsonschema.validate(json.loads(response.output_text), PARAMETERS)


TAGS = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
TAGGED: dict[str, Any] = {
    "type": "object",
    "properties": {"the tags": TAGS, "mail": {"type": "string", "pattern": "^(?!x)[a-z]+$", "maxLength": 6}},
    "required": ["the tags", "mail"],
    "not": {"required": ["other"]},
}


async def test_unenforceable_constraints_are_dropped_without_strict(client: Any) -> None:
    """All other constraints in the schemas of tools and response formats are still enforced."""
    wider = {**TAGGED, "properties": {"the tags": {**TAGS, "uniqueItems": False}, "mail": {"maxLength": 6}}}
    tool = {"type": "function", "function": {"name": "tag", "parameters": TAGGED}}
    answer = await client.chat.completions.create(
        model="demo", messages=USER, tools=[tool], tool_choice="required", max_tokens=200, temperature=0
    )
    calls = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), wider)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TAGGED}}
    answer = await client.chat.completions.create(
        model="demo", messages=USER, response_format=form, max_tokens=200, temperature=0
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), wider)


async def test_unenforceable_strict_schema_gets_400_naming_the_keyword(client: Any) -> None:
    chat, respond = client.chat.completions.create, client.responses.create
    wrong = {"type": "object", "properties": {"the tags": TAGS}}
    strict: dict[str, Any] = {"name": "tag", "parameters": wrong, "strict": True}
    tools: list[Any] = [WEATHER, {"type": "function", "function": strict}]
    forced: dict[str, Any] = {"model": "demo", "tool_choice": "required"}
    place = "parameters.properties.the tags.uniqueItems"
    with pytest.raises(openai.BadRequestError, match="without strict") as refused:
        await chat(messages=USER, tools=tools, **forced)
    assert refused.value.param == f"tools[1].function.{place}"
    flat: list[Any] = [{"type": "function", **WEATHER["function"]}, {"type": "function", **strict}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.parameters") as refused:
        await respond(input="Hi", tools=flat, **forced)
    assert refused.value.param == f"tools[1].{place}"
    form = {"name": "x", "schema": wrong, "strict": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        await chat(model="demo", messages=USER, response_format={"type": "json_schema", "json_schema": form})
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        await respond(model="demo", input="Hi", text={"format": {"type": "json_schema", **form}})
    assert refused.value.param == "text.format.schema"
