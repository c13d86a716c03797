"""Forced calls of a model that knows no tools: the demo model on the CPU, grammars compiled in its engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
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
async def gateway(live: Callable[..., Any], demo_engine: str, until: Any) -> AsyncIterator[Any]:
    started = await live(demo_engine, wait=False)
    await until(lambda: any(engine.serving for engine in started.gateway.table), 180)
    yield started


@pytest.fixture
def client(gateway: Any) -> openai.AsyncOpenAI:
    return gateway.client().with_options(timeout=120)


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS if name == "weather" else {"maxProperties": 0})


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_required_tool(client: Any, temperature: float) -> None:
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


async def test_a_named_tool_streamed(client: Any) -> None:
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


async def test_a_response_with_a_forced_call_and_what_follows(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    told: list[Any] = [*USER]
    options: dict[str, Any] = {"model": "demo", "tools": [tool], "tool_choice": "required"}
    response = await client.responses.create(input=told, max_output_tokens=300, **options)
    calls = [item for item in response.output if item.type == "function_call"]
    check([(call.name, call.arguments) for call in calls])
    assert len(calls) == len(response.output)


async def test_a_response_in_a_form(client: Any) -> None:
    form = {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}
    response = await client.responses.create(model="demo", input="Hi", text={"format": form}, temperature=1.3)
    jsonschema.validate(json.loads(response.output_text), PARAMETERS)


async def test_a_schema_that_cannot_be_enforced(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/missing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="demo", messages=USER, tools=[tool], tool_choice="required", max_tokens=20
        )
    assert refused.value.param == "tools"
